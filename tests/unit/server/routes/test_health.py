import re

from groupwise.api.http.prometheus import LATENCIES, RequestMetrics
from groupwise.api.schemas.training import Counters, Memory, StatusAnswer, Throughput
from groupwise.server.routes.health import render

LINE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? \S+')


def test_every_line_is_of_the_format_and_every_name_is_declared_once() -> None:
    metrics = RequestMetrics()
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        metrics.observe("GET /status", 200, seconds)
    metrics.refusals['odd "code"\\\n'] += 1
    status = StatusAnswer(
        phase="running",
        run_id="r",
        step=3,
        model_version=("r", 3),
        fingerprint="f",
        counters=Counters(open=2, trained=5),
        throughput=Throughput(sampled_tokens=7, seconds_per_step=1.5),
        memory=Memory(engine_bytes=1000),
    )
    text = render(metrics, status)
    assert text.endswith("\n")
    declared = re.findall(r"^# TYPE (\S+) (?:counter|gauge|histogram)$", text, re.MULTILINE)
    assert len(declared) == len(set(declared))
    for line in text.splitlines():
        if not line.startswith("#"):
            assert LINE.fullmatch(line), line
            name = re.split(r"[{ ]", line)[0]
            assert re.sub(r"_(bucket|sum|count)$", "", name) in declared
    assert 'groupwise_groups{state="open"} 2' in text
    assert 'groupwise_model_version{run="r",step="3",fingerprint="f"} 1' in text
    assert ("groupwise_step_seconds 1.5" in text, "process_cpu_seconds_total" in text) == (1, 1)
    counts = re.findall(r'http_request_seconds_bucket\{[^}]*le="([^"]+)"\} (\d+)', text)
    assert len(counts) == len(LATENCIES) + 1
    counts_by_bound = dict(counts)
    assert [counts_by_bound[each] for each in ("0.002", "0.5", "300", "+Inf")] == [
        "2",
        "3",
        "3",
        "4",
    ]
