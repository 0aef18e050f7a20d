"""When ranks are expected."""

from groupwise.engine.distributed import prefork
from groupwise.training import placement
from groupwise.training.assembly import prepare
from groupwise.training.config import load_config


def test_a_zygote_is_begun_early_only_where_it_will_be_needed(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(prepare, "NVIDIA", tmp_path / "nvidiactl")
    monkeypatch.setattr(prefork, "start_zygote", lambda: begun.append(True))
    monkeypatch.setattr(prefork, "end_zygote", begun.clear)
    monkeypatch.setattr(placement, "available_cores", lambda: 2)

    def expected(**sections) -> bool:
        with prepare.expected_ranks(load_config(sections).config):
            found = bool(begun)
        assert not begun
        return found

    large = {"name": "some/model"}
    assert expected(model=large)
    assert not expected(model={"name": "tiny"})
    assert not expected(model=large, run={"processes": 1})
    assert not expected(model=large, run={"threads": 1})
    assert not expected(model=large, lora=None)
    prepare.NVIDIA.touch()
    assert not expected(model=large)
