"""Mistakes that are made on purpose in a copy of the package, and the tests that must fail then.

The items are those of docs/correctness.md, which lists the same tests. A mistake is one that a reasonable change could make; the
narrowest tests are named, because each costs a process. `tests/mutating.py` runs them.
"""

from __future__ import annotations

from tests.mutating import Mutation

ADVANTAGES = "tests/unit/algorithms/test_advantages.py"
CONTRACT = "tests/contract/test_learner_contract.py"
DRAWS = "tests/integration/test_draws.py"
EXPORT = "tests/unit/models/test_export.py"
FORWARD = "tests/unit/learner/test_forward.py"
GENERATION = "tests/unit/generation"
GRAPH_ENGINE = "tests/unit/sampler/native/test_graph_engine.py"
HUB_PUSH = "tests/unit/models/test_hub_push.py"
JSONL_SINK = "tests/unit/callbacks/test_jsonl_sink.py"
LEARNER = "tests/unit/learner/test_torch_learner.py"
LEARNING = "tests/unit/loops/test_learning_of_a_step.py"
MLFLOW_SINK = "tests/unit/callbacks/test_mlflow_sink.py"
NATIVE = "tests/unit/learner/native"
NATIVE_MODEL = "tests/unit/models/native"
NATIVE_SAMPLER = "tests/unit/sampler/native/test_engine.py"
PARTS = "tests/unit/server/parts/test_service.py"
RANK_LEARNER = "tests/unit/ranks/test_rank_learner.py"
RANK_SAMPLER = "tests/unit/ranks/test_rank_sampler.py"
REPORTING = "tests/unit/callbacks/test_reporting.py"
RESUME = "tests/integration/test_resume.py"
ROWS = "tests/unit/rollouts/test_rows.py"
RUSH_HOUR = "tests/unit/rewards/test_rush_hour.py"
SAMPLER = "tests/unit/sampler/test_torch_sampler.py"
SAMPLERS = "tests/contract/test_sampler_contract.py"
SCHEDULES = "tests/integration/test_schedules.py"
SELECTION = "tests/unit/data/test_selection.py"
RECOVERY = "tests/unit/server/test_recovery.py"
SESSION = "tests/unit/remote/test_session.py"
SERVICE = "tests/unit/server/test_service.py"
SUITES = "tests/unit/evaluation/test_suites.py"

MUTATIONS = (
    Mutation(
        "1",
        "a row is trained on tokens that were written as text and read again",
        (
            (
                "sampler/queued.py",
                "token_ids=tuple(member.token_ids),",
                "token_ids=tuple(self._tokenizer(self._tokenizer.decode(member.token_ids, "
                "skip_special_tokens=True))['input_ids']),",
            ),
        ),
        (f"{SAMPLER}::test_sampled_ids_are_verbatim_where_text_would_change_them",),
    ),
    Mutation(
        "2",
        "a turn that the template wrote anew is trained in the row before it",
        (
            (
                "rollouts/rows.py",
                "if segment.prompt_ids is not None:",
                "if segment.prompt_ids is not None and not parts[-1][1]:",
            ),
        ),
        (
            "tests/unit/rollouts/test_environment.py::test_template_that_forgets_reasoning_begins_a_new_row",
        ),
    ),
    Mutation(
        "3",
        "the mask leaves out every token that has the id of the end token",
        (
            (
                "rollouts/rows.py",
                'mask.extend([1 if segment.source == "policy" else 0] * length)',
                'mask.extend(int(segment.source == "policy" and i != 1) for i in segment.token_ids)',
            ),
        ),
        (f"{ROWS}::test_the_last_stop_token_teaches_once_and_a_truncated_row_has_none",),
    ),
    Mutation(
        "3",
        "padding is told by the id of its token",
        (
            (
                "learner/forward.py",
                "return torch.arange(widest(rows), device=device) < lengths_B[:, None]",
                "return (_padded_ids(rows, device) != 0) & (lengths_B[:, None] > 0)",
            ),
        ),
        (f"{FORWARD}::test_padding_is_told_by_lengths_and_not_by_its_token",),
    ),
    Mutation(
        "4",
        "the question is trained with the answer",
        (
            (
                "models/chat_masks.py",
                "    mask = (0,) * len(opening) + (1,) * (end - len(opening)) + ",
                "    mask = (1,) * len(opening) + (1,) * (end - len(opening)) + ",
            ),
        ),
        (
            "tests/unit/models/test_chat_masks.py::test_spans",
            "tests/unit/rollouts/test_original_templates.py::test_what_is_trained_are_the_answers",
        ),
    ),
    Mutation(
        "5",
        "tokens of the environment teach",
        (("rollouts/rows.py", '[1 if segment.source == "policy" else 0]', "[1]"),),
        (f"{ROWS}::test_only_what_the_policy_wrote_teaches",),
    ),
    Mutation(
        "5",
        "tokens of the environment count in the length of a rollout",
        (
            (
                "algorithms/advantages.py",
                'for segment in rollout.segments if segment.source == "policy")',
                "for segment in rollout.segments)",
            ),
        ),
        (
            f"{ADVANTAGES}::test_only_what_the_policy_wrote_is_trained",
            "tests/unit/algorithms/test_grpo.py::test_tokens_of_the_environment_count_nowhere",
        ),
    ),
    Mutation(
        "6",
        "only the first stop token stops",
        (
            (
                "sampler/queued.py",
                "if token in params.stop_token_ids or",
                "if token in params.stop_token_ids[:1] or",
            ),
        ),
        (f"{SAMPLER}::test_every_stop_token_ends_a_completion",),
    ),
    Mutation(
        "6",
        "a stop text is looked for in the last token alone",
        (
            (
                "sampler/stops.py",
                "tail = text_of(token_ids[-reach:])",
                "tail = text_of(token_ids[-1:])",
            ),
        ),
        (f"{SAMPLER}::test_a_stop_text_is_found_however_it_is_cut",),
    ),
    Mutation(
        "7",
        "keys are as many as the longest completion of the moment needs",
        (
            (
                "models/decoder.py",
                "        return self.keys[layer_idx], self.values[layer_idx]\n",
                "        most = int(self.positions.max()) + 1\n"
                "        return self.keys[layer_idx][:, :, :most], self.values[layer_idx][:, :, :most]\n",
            ),
            (
                "sampler/slot_engine.py",
                "mask_S1K = torch.arange(self._key_length, device=device)",
                "mask_S1K = torch.arange(int(positions_S.max()) + 1, device=device)",
            ),
        ),
        (f"{SAMPLER}::test_neither_order_nor_mates_nor_slots_change_a_bit[transformers-dtype0]",),
    ),
    Mutation(
        "7",
        "rows move in the native cache without their keys and values",
        (
            (
                "sampler/native/engine.py",
                "self._own.arrange(places, longest - 1)",
                "self._own.arrange(range(len(places)), longest - 1)",
            ),
        ),
        (f"{SAMPLER}::test_neither_order_nor_mates_nor_slots_change_a_bit[native-dtype0]",),
    ),
    Mutation(
        "7",
        "a row sees what another one left behind its keys",
        (
            (
                "models/native/kernels.py",
                "    scores_T[seen:] = np.float32(0.0)\n",
                "    scores_T[seen + 1 :] = np.float32(0.0)\n",
            ),
        ),
        (f"{SAMPLER}::test_late_arrivals_join_in_without_disturbing[native]",),
    ),
    Mutation(
        "7",
        "on a GPU a row sees what another one left behind its keys",
        (
            (
                "sampler/native/graph_engine.py",
                "device=model.device) > positions_S[:, None]",
                "device=model.device) > positions_S[:, None] + 1",
            ),
        ),
        (
            f"{NATIVE_SAMPLER}::test_random_schedules_leave_every_row_its_bits[wide-False-graph-float32]",
        ),
    ),
    Mutation(
        "7",
        "a caller is given the memory that the next token on a GPU is written to",
        (
            (
                "sampler/native/graph_engine.py",
                "multiple(longest, KEYS)))()[places]",
                "multiple(longest, KEYS)))()[: len(places)]",
            ),
        ),
        (f"{GRAPH_ENGINE}::test_what_a_caller_holds_is_not_overwritten_by_the_next_token",),
    ),
    Mutation(
        "7",
        "prompts of one length are taken for one prompt",
        (
            (
                "sampler/native/cache.py",
                "groupby(rows, key=lambda row: row.prompt)",
                "((same[0].prompt, same) for _, each in "
                "groupby(rows, key=lambda row: row.prompt.length) for same in [[*each]])",
            ),
        ),
        (f"{SAMPLER}::test_nothing_of_the_old_policy_is_left_in_a_shared_system_prompt[native]",),
    ),
    Mutation(
        "7",
        "all completions draw from one stream of random numbers",
        (
            (
                "sampler/queued.py",
                "uniform(member.seed, len(member.token_ids)) for member",
                "float(torch.rand(())) for member",
            ),
        ),
        (f"{SAMPLERS}::test_results_do_not_depend_on_what_else_is_asked[torch-adapter]",),
    ),
    Mutation(
        "7",
        "packed rows see those before them",
        (
            (
                "learner/forward.py",
                "return same_SLL & causal_mask(",
                "return same_SLL | causal_mask(",
            ),
        ),
        (f"{FORWARD}::test_packed_rows_equal_whole_rows_in_values_and_gradients[llama-10000]",),
    ),
    Mutation(
        "8",
        "a member is compared with those of its place in other groups",
        (
            (
                "algorithms/advantages.py",
                "    differences = [centred(values) for values in rewards]\n    if scale ==",
                "    by_place = [centred(values) for values in zip(*rewards)]\n"
                "    differences = [list(values) for values in zip(*by_place)]\n    if scale ==",
            ),
        ),
        (
            f"{ADVANTAGES}::test_a_group_does_not_know_the_others[dr_grpo]",
            "tests/unit/algorithms/test_dr_grpo.py::test_weights_and_denominators",
        ),
    ),
    Mutation(
        "8",
        "groups are trained in the order in which they are scored",
        (
            (
                "loops/schedules.py",
                "        return await gather_all(one(draw) for draw in draws)",
                "        await gather_all(one(draw) for draw in draws)\n"
                "        return [group for draw, group in self._run.drawn.items() if draw in draws]",
            ),
        ),
        (f"{DRAWS}::test_what_is_scored_first_does_not_matter",),
    ),
    Mutation(
        "9",
        "rewards that differ by rounding are no tie",
        (
            (
                "algorithms/advantages.py",
                "return spread <= TIE_TOLERANCE *",
                "return spread <= 0.0 *",
            ),
        ),
        (f"{ADVANTAGES}::test_rewards_that_differ_by_rounding_are_the_same",),
    ),
    Mutation(
        "9",
        "a spread is divided by itself, however small",
        (
            (
                "algorithms/advantages.py",
                "difference / (std + STD_EPSILON)",
                "difference / (std or 1.0)",
            ),
        ),
        (f"{ADVANTAGES}::test_tiny_spreads_do_not_explode",),
    ),
    Mutation(
        "10",
        "a failed member counts as 0",
        (
            (
                "algorithms/advantages.py",
                "return [_reward(rollout) for rollout in group.scored]",
                "return [rollout.reward or 0.0 for rollout in group.rollouts]",
            ),
            (
                "algorithms/advantages.py",
                'next(left) if rollout.outcome == "scored" else None for',
                "next(left) for",
            ),
        ),
        (
            f"{ADVANTAGES}::test_failed_members_are_as_if_never_there[dr_grpo]",
            "tests/unit/algorithms/test_grpo.py::test_failed_members_have_no_weight_and_no_share",
        ),
    ),
    Mutation(
        "10",
        "a failed member is logged as 0",
        (
            (
                "loops/metrics.py",
                "[rollout.reward for rollout in group.scored if rollout.reward is not None]",
                "[rollout.reward or 0.0 for rollout in group.rollouts]",
            ),
        ),
        ("tests/unit/loops/test_metrics.py::test_rewards_are_of_scored_members_only",),
    ),
    Mutation(
        "11",
        "a group without signal leaves the denominator",
        (
            (
                "loops/learning.py",
                "[groups[index] for index in part], run.longest_completion",
                "[groups[index] for index in part if rows_by_group[index]], run.longest_completion",
            ),
        ),
        (f"{LEARNING}::test_groups_without_signal_cost_nothing_and_stay_in_the_denominator",),
    ),
    Mutation(
        "11",
        "a failed member throws its group away",
        (
            (
                "algorithms/family.py",
                "return not tied([reward_of_the_task(rollout) for rollout in group.scored])",
                "return len(group.scored) == len(group.rollouts) and not tied("
                "[reward_of_the_task(rollout) for rollout in group.scored])",
            ),
        ),
        ("tests/unit/algorithms/test_family.py::test_dynamic_sampling_accepts_what_differs",),
    ),
    Mutation(
        "12",
        "a micro-batch is divided by its own number of tokens",
        (
            (
                "learner/torch_learner.py",
                "                value / denominators[name]\n",
                '                value / max(1.0, float(result.stats["tokens"]))\n',
            ),
        ),
        (
            f"{LEARNER}::test_the_budget_of_a_micro_batch_does_not_matter[20-adapter]",
            f"{LEARNER}::test_supervised_gradients_do_not_depend_on_the_cuts[45-True-adapter]",
            f"{LEARNER}::test_ranks_that_add_their_gradients_have_that_of_the_whole[2-adapter]",
        ),
    ),
    Mutation(
        "12",
        "no gradient flows through a shared prompt",
        (
            (
                "models/decoder.py",
                "        self.keys.append(key)\n        self.values.append(value)\n",
                "        self.keys.append(key.detach())\n        self.values.append(value.detach())\n",
            ),
            (
                "learner/native/beside.py",
                "                self._prompt_rows(d_qkv)[:, part] += d_of_prompt_JPD.transpose(0, 1)\n",
                "                pass\n",
            ),
        ),
        (
            f"{FORWARD}::test_shared_prompts_equal_whole_rows_in_values_and_gradients[llama]",
            f"{NATIVE}/test_attention.py::test_values_and_gradients[pieces-a group]",
            f"{NATIVE}/test_engine.py::test_every_family[llama]",
        ),
    ),
    Mutation(
        "12",
        "the gradient of one rank is left out of the sum",
        (
            (
                "learner/replicas.py",
                "for other_N in self._gradients_CN[1:]:",
                "for other_N in self._gradients_CN[2:]:",
            ),
        ),
        (
            "tests/unit/learner/test_replicas.py::test_all_have_the_sum_of_all[2]",
            f"{RANK_LEARNER}::test_the_same_is_learnt_as_in_one_process[3-1]",
        ),
    ),
    Mutation(
        "12",
        "each update of a step is divided by the whole step",
        (
            (
                "loops/learning.py",
                "[groups[index] for index in part], run.longest_completion",
                "groups, run.longest_completion",
            ),
        ),
        (f"{LEARNING}::test_every_update_is_divided_by_its_own_groups",),
    ),
    Mutation(
        "13",
        "the sum of the loss forgets the mask",
        (
            (
                "algorithms/ops.py",
                "(values_BT * scales_B.unsqueeze(-1)).masked_fill(mask_BT == 0, 0.0).sum()",
                "(values_BT * scales_B.unsqueeze(-1)).sum()",
            ),
        ),
        (
            "tests/unit/algorithms/test_family.py::test_batch_without_a_trained_token_is_zero",
            "tests/unit/algorithms/test_sft_loss.py::test_only_masked_in_tokens_count",
        ),
    ),
    Mutation(
        "15",
        "the ratio is taken against the policy of the moment, so it is always 1",
        (
            (
                "algorithms/family.py",
                "sampled = batch.sampling_logprobs_BT.detach()",
                "sampled = batch.policy_logprobs_BT.detach()",
            ),
        ),
        ("tests/unit/algorithms/test_grpo.py::test_off_policy_loss_with_penalty",),
    ),
    Mutation(
        "15",
        "proximal log-probabilities are those before each update instead of before the first",
        (
            (
                "loops/learning.py",
                "        sums = await _forward_backward(run, rows, denominators, droppable=not norms)",
                "        (rows,) = await _with_logprobs(run, [rows])\n"
                "        sums = await _forward_backward(run, rows, denominators, droppable=not norms)",
            ),
        ),
        (f"{LEARNING}::test_proximal_logprobs_are_those_before_the_first_update",),
    ),
    Mutation(
        "16",
        "the clip acts on the side of the loss",
        (("algorithms/ops.py", "advantages_B1).minimum(", "advantages_B1).maximum("),),
        ("tests/unit/algorithms/test_clipped.py::test_clip_acts_on_the_side_of_the_gain",),
    ),
    Mutation(
        "16",
        "the weight of CISPO has a gradient",
        (
            (
                "algorithms/cispo.py",
                "ops.bounded(log_ratio_BT.detach()).exp()",
                "ops.bounded(log_ratio_BT).exp()",
            ),
        ),
        ("tests/unit/algorithms/test_cispo.py::test_loss_and_gradient",),
    ),
    Mutation(
        "16",
        "the ratio of a sequence is the product of its tokens'",
        (("algorithms/gspo.py", "mask_BT, mean=True)", "mask_BT, mean=False)"),),
        ("tests/unit/algorithms/test_gspo.py::test_ratio_is_the_exponential_of_the_mean",),
    ),
    Mutation(
        "18",
        "packed rows have no gradient of their entropy",
        (
            (
                "learner/forward.py",
                "return packed_rows(decoder, batch, self.wanted)",
                "return packed_rows(decoder, batch)",
            ),
        ),
        (f"{LEARNER}::test_every_fast_path_equals_the_plain_one_with_every_option[grpo-packed]",),
    ),
    Mutation(
        "18",
        "native decoding leaves the adapter out",
        (
            (
                "sampler/native/engine.py",
                "attend, self._few, few=True",
                "attend, None, few=True",
            ),
        ),
        (
            f"{NATIVE_SAMPLER}::test_prompts_of_all_lengths_and_groups_of_all_sizes[native-llama-True]",
            f"{CONTRACT}::test_sampler_and_learner_agree[torch-adapter-1.0]",
        ),
    ),
    Mutation(
        "18",
        "the native head moves logits away from 0 instead of towards it",
        (("models/native/weights.py", "bias_O - self.shift", "bias_O + self.shift"),),
        (
            f"{NATIVE_MODEL}/test_forward.py::test_in_bfloat16_they_are_as_near_to_float32_as_transformers[llama]",
        ),
    ),
    Mutation(
        "18",
        "the native learner turns queries and keys of a completion from 0 on",
        (
            (
                "learner/native/layout.py",
                "first = 0 if prompt is None else prompt[1]",
                "first = 0",
            ),
        ),
        (
            f"{NATIVE}/test_layout.py::test_each_completion_token_follows_its_own_text",
            f"{NATIVE}/test_engine.py::test_every_family[llama]",
        ),
    ),
    Mutation(
        "20",
        "the learner takes log-probabilities at temperature 1",
        (
            (
                "models/logprobs.py",
                "decoder.logits(hidden_NH) / temperatures_N[:, None]",
                "decoder.logits(hidden_NH)",
            ),
            (
                "learner/native/head.py",
                "scaled_RV.copy_(logits_RV).div_(targets.temperatures_N[:, None])",
                "scaled_RV.copy_(logits_RV)",
            ),
        ),
        (
            f"{CONTRACT}::test_sampler_and_learner_agree[torch-adapter-0.5]",
            f"{CONTRACT}::test_sampler_and_learner_agree[torch-full-0.5]",
        ),
    ),
    Mutation(
        "20",
        "the learner does not know which tokens were withheld",
        (("learner/forward.py", "withheld_X2=_withheld(rows, among_A),", "withheld_X2=None,"),),
        (
            f"{CONTRACT}::test_they_agree_where_the_end_could_not_be_drawn[torch-adapter-1.0]",
            f"{FORWARD}::test_what_could_not_be_drawn_is_left_out_in_its_own_row_and_place",
            "tests/integration/test_on_policy.py::test_every_step_begins_at_a_ratio_of_1_with_a_least_length",
        ),
    ),
    Mutation(
        "20",
        "withheld tokens are counted from the beginning of the row",
        (
            (
                "rollouts/rows.py",
                "end = start + min(params.min_tokens, len(segment.token_ids))",
                "end = min(params.min_tokens, start + len(segment.token_ids))",
            ),
        ),
        (
            f"{ROWS}::test_each_segment_withholds_the_stop_tokens_from_its_own_beginning",
            "tests/unit/rollouts/test_two_stage.py::test_reasoning_and_answer_both_have_their_least_length",
        ),
    ),
    Mutation(
        "22",
        "the sampler believes what it is told about its weights",
        (
            (
                "sampler/queued.py",
                "self._fingerprint = fingerprint(self._weights.tensors())\n        refuse",
                "self._fingerprint = policy.fingerprint\n        refuse",
            ),
        ),
        (f"{SAMPLERS}::test_other_weights_than_named_are_refused[torch-adapter]",),
    ),
    Mutation(
        "22",
        "the loop trains on whatever was sampled by whomever",
        (
            (
                "loops/drawing.py",
                "    check_served(policy, group)\n    if isinstance(group",
                "    if isinstance(group",
            ),
        ),
        ("tests/integration/test_on_policy.py::test_completions_of_other_weights_stop_the_run",),
    ),
    Mutation(
        "23",
        "keys and values of a prompt outlive the policy that computed them",
        (
            (
                "sampler/torch_sampler.py",
                "            ticket.prompt = self._engine.prefill(ticket.request.prompt_ids)\n",
                "            kept = self.__dict__.setdefault('kept', {})\n"
                "            ids = ticket.request.prompt_ids\n"
                "            ticket.prompt = kept[ids] = kept.get(ids) or self._engine.prefill(ids)\n",
            ),
        ),
        (
            f"{SAMPLER}::test_nothing_of_the_old_policy_is_left[native]",
            f"{SAMPLER}::test_nothing_of_the_old_policy_is_left[transformers]",
        ),
    ),
    Mutation(
        "23",
        "completions are decoded natively with the adapter from before",
        (
            (
                "sampler/native/engine.py",
                "        self._few = [linear.packed_low_rank(factors) for linear in linears]\n",
                "        self._few = self._few or [each.packed_low_rank(factors) for each in linears]\n",
            ),
        ),
        (
            f"{NATIVE_SAMPLER}::test_new_weights_are_served_at_once_and_entirely[native-llama-biases-True]",
        ),
    ),
    Mutation(
        "23",
        "recordings for a GPU are replayed with the adapter from before",
        (("sampler/native/graph_engine.py", "old.copy_(new)", "pass"),),
        (
            f"{GRAPH_ENGINE}::test_a_new_adapter_is_taken_in_place_and_recordings_stay",
            f"{NATIVE_SAMPLER}::test_new_weights_are_served_at_once_and_entirely[tape-qwen3-True]",
        ),
    ),
    Mutation(
        "24b",
        "the adapter is added after rounding",
        (
            (
                "models/lora.py",
                "torch.addmm(low.flatten(0, -2), x.flatten(0, -2), base.weight.t())",
                "low.flatten(0, -2) + F.linear(x, base.weight).flatten(0, -2)",
            ),
            (
                "learner/native/product.py",
                "(low_NR @ self.low.up_OR.t()).addmm_(x_NI, self.linear.weight_OI.t())",
                "low_NR @ self.low.up_OR.t() + x_NI @ self.linear.weight_OI.t()",
            ),
            (
                "models/native/linear.py",
                "found_NO = torch.addmm(low.added(x_NI), x_NI, self.weight_OI.t())",
                "found_NO = low.added(x_NI) + x_NI @ self.weight_OI.t()",
            ),
            (
                "models/native/packed.py",
                "            products.product(\n"
                "                x, self._weights, self._bias_O, low.down, low_NR, low.up_RO, low.ranks_B2, into, first, last\n",
                "            none = self._no_adapter\n"
                "            products.product(\n"
                "                x, self._weights, self._bias_O,\n"
                "                none.down, NOT_YET, none.up_RO, none.ranks_B2, into, first, last\n"
                "            )\n"
                "            added_NO = torch.empty_like(into_NO)\n"
                "            products.product(\n"
                "                x, 0 * self._weights, 0 * self._bias_O,\n"
                "                low.down, NOT_YET, low.up_RO, low.ranks_B2, array(added_NO), first, last\n"
                "            )\n"
                "            into_NO.copy_((into_NO.bfloat16() + added_NO.bfloat16()).float())\n"
                "            (\n",
            ),
        ),
        (
            "tests/unit/models/test_lora.py::test_a_small_change_acts_in_full_on_a_rounded_base",
            f"{NATIVE}/test_product.py::test_a_small_change_acts_in_full_on_a_rounded_base",
            f"{NATIVE_MODEL}/test_linear.py::test_a_small_change_acts_in_full_on_a_rounded_base[1e-05-True-0.0]",
            f"{NATIVE_MODEL}/test_linear.py::test_a_small_change_acts_in_full_on_a_rounded_base[1e-05-False-0.0]",
        ),
    ),
    Mutation(
        "25",
        "the lag is ignored",
        (
            (
                "loops/schedules.py",
                "min(run.step + self._lag + 1, run.max_steps)",
                "min(run.step + 1, run.max_steps)",
            ),
        ),
        (f"{SCHEDULES}::test_the_groups_of_a_step_come_from_the_policy_that_the_lag_says[2]",),
    ),
    Mutation(
        "25",
        "after a resume everything is sampled by the newest policy",
        (
            (
                "loops/schedules.py",
                "await self._serve(run.earlier.get(max(0, step - self._lag), run.policy))",
                "await self._serve(run.policy)",
            ),
        ),
        (f"{SCHEDULES}::test_a_lagged_run_stops_cleanly_and_goes_on[1-2]",),
    ),
    Mutation(
        "25",
        "the free schedule gives up groups that take too long",
        (
            (
                "loops/schedules.py",
                "            chosen = self._choose(size)\n",
                "            for draw, each in list(self._under_way.items()):\n"
                "                if not each.group and each.task and each.since <= run.step - self._lag:\n"
                "                    each.task.cancel()\n"
                "                    del self._under_way[draw]\n"
                "            chosen = self._choose(size)\n",
            ),
        ),
        (f"{SCHEDULES}::test_the_free_schedule_loses_nobody[1]",),
    ),
    Mutation(
        "26",
        "a seed knows the example and not the draw",
        (
            (
                "loops/drawing.py",
                "member_seed(training.seed, draw, member, segment)",
                "member_seed(training.seed, example.index, member, segment)",
            ),
        ),
        (f"{DRAWS}::test_an_example_that_is_drawn_twice_in_a_step_is_two_groups",),
    ),
    Mutation(
        "26",
        "all members of a group have one seed",
        (
            (
                "rollouts/seeds.py",
                'derive("member", seed, draw, member, segment, attempt)',
                'derive("member", seed, draw, segment, attempt)',
            ),
        ),
        ("tests/unit/rollouts/test_seeds.py::test_members_of_all_groups_of_a_step_are_distinct",),
    ),
    Mutation(
        "26",
        "each rank takes the first seeds of a group that is divided",
        (
            (
                "ranks/sampler.py",
                "seeds=seeds[share.start : share.end]",
                "seeds=seeds[: share.members]",
            ),
        ),
        (f"{RANK_SAMPLER}::test_the_same_completions_as_in_one_process[6]",),
    ),
    Mutation(
        "27",
        "examples are drawn with replacement",
        (
            (
                "data/order.py",
                "return _permutation(examples, seed, epoch)[position] if shuffle else position",
                'return Stream("order", seed, draw).below(examples) if shuffle else position',
            ),
        ),
        ("tests/unit/data/test_order.py::test_each_epoch_holds_every_example_once",),
    ),
    Mutation(
        "27",
        "rows that are held out are trained on, too",
        (
            (
                "data/mixture.py",
                "train = [_those(part, lambda row: not held_out[key(row)]) for part in parts]",
                "train = list(parts)",
            ),
        ),
        (
            "tests/unit/data/test_mixture.py::test_held_out_rows_are_disjoint_by_prompt_across_all_sets",
            "tests/unit/tasks/test_configured.py::test_held_out_share_is_never_trained_on",
        ),
    ),
    Mutation(
        "27",
        "a weight above 1 takes each row of a set once",
        (
            (
                "data/order.py",
                "for _ in range(int(share.weight))",
                "for _ in range(min(int(share.weight), 1))",
            ),
        ),
        (
            "tests/unit/data/test_mixture.py::test_every_epoch_has_the_shares_and_all_of_them_all_rows",
        ),
    ),
    Mutation(
        "27",
        "rows of a mixture do not say whose rewards they have",
        (
            (
                "data/named.py",
                "return named if label is None else {**named, TASK_COLUMN: label}",
                "return named",
            ),
        ),
        ("tests/unit/tasks/test_configured.py::test_whole_tasks_stand_beside_sources",),
    ),
    Mutation(
        "28",
        "a resume with more steps reads more of a mixture's streams",
        (
            (
                "tasks/configured.py",
                "return self._call(hook, **arguments, limit=limit)",
                'return self._call(hook, **arguments, limit=2 * arguments["config"]["training"]["max_steps"])',
            ),
        ),
        (
            "tests/unit/tasks/test_configured.py::test_a_resumed_mixture_reads_its_streams_as_far_as_it_began",
        ),
    ),
    Mutation(
        "28",
        "the moments of the optimiser are not restored",
        (
            (
                "learner/torch_learner.py",
                "        copy_parts(self._optimiser_tensors(), stored, str(place / OPTIMISER))\n",
                "",
            ),
        ),
        (f"{CONTRACT}::test_save_and_load_restore_exactly[torch-adapter]",),
    ),
    Mutation(
        "28",
        "the random numbers of dropout begin anew",
        (
            (
                "learner/torch_learner.py",
                'self._updates = int(read_json(place / STATE)["updates"])',
                "self._updates = 0",
            ),
        ),
        (f"{LEARNER}::test_another_process_goes_on_where_the_checkpoint_was[adapter]",),
    ),
    Mutation(
        "28",
        "only the first rank reads a checkpoint",
        (
            (
                "ranks/learner.py",
                'self._ranks.call_all_now("learner.load", folder)',
                'self._ranks.call_each_now([(0, "learner.load", (folder,))])',
            ),
        ),
        (f"{RANK_LEARNER}::test_checkpoints_go_to_and_fro",),
    ),
    Mutation(
        "28",
        "the data begin anew",
        (("loops/run.py", 'self.next_draw = position["next_draw"]', "self.next_draw = 0"),),
        (f"{RESUME}::test_every_way_of_training_resumes_bit_equal[entropy bonus]",),
    ),
    Mutation(
        "28",
        "the replay buffer begins anew",
        (("data/selection.py", 'self.replay.load_state(state["replay"])', "pass"),),
        (f"{RESUME}::test_every_way_of_training_resumes_bit_equal[prompts again]",),
    ),
    Mutation(
        "28",
        "what was chosen for a step under way is chosen again, when more is known",
        (("data/selection.py", 'blocks = state.get("blocks", {})', "blocks: dict[str, Any] = {}"),),
        (f"{SELECTION}::test_what_was_chosen_ahead_is_not_chosen_anew",),
    ),
    Mutation(
        "27",
        "examples that a step had at hand and did not need lose their turn",
        (
            (
                "data/selection.py",
                "self._unused = [choice.index",
                "self._unused = [0 * choice.index",
            ),
        ),
        (f"{SELECTION}::test_what_a_step_leaves_is_the_next_ones",),
    ),
    Mutation(
        "27",
        "failures of a prompt that is drawn again are never debited",
        (
            (
                "data/selection.py",
                "if prompt in replay and (choice.again is not None or not worthy):",
                'if prompt in replay and not worthy and choice.origin == "fresh":',
            ),
        ),
        (f"{SELECTION}::test_failures_are_debited_to_the_prompt_that_was_drawn_again",),
    ),
    Mutation(
        "20",
        "the temperature of the schedule does not reach the sampler",
        (
            (
                "loops/run.py",
                "return replace(self.params, temperature=self.config.sampler.temperature_at(step))",
                "return self.params",
            ),
        ),
        (
            "tests/integration/test_selection.py::test_every_token_of_a_step_is_drawn_at_its_temperature",
        ),
    ),
    Mutation(
        "28",
        "the weight of an adaptive penalty begins anew",
        (("loops/run.py", 'self.algorithm = make(**position["algorithm"])', "pass"),),
        (f"{RESUME}::test_every_way_of_training_resumes_bit_equal[adaptive kl]",),
    ),
    Mutation(
        "28",
        "steps in a row whose update was left out are counted anew",
        (("loops/training.py", 'self.non_finite = position["non_finite"]', "pass"),),
        ("tests/integration/test_numerical_safety.py::test_a_resumed_run_goes_on_counting",),
    ),
    Mutation(
        "28",
        "steps in a row without a reward are counted anew",
        (("loops/run.py", 'self.unscored_steps = position["unscored_steps"]', "pass"),),
        (f"{RESUME}::test_steps_without_a_reward_are_counted_across_a_resume",),
    ),
    Mutation(
        "28",
        "the policies of the lag are forgotten",
        (
            (
                "loops/run.py",
                "self.earlier[int(name)] = replace(self.policy, **facts, path=str(kept))",
                "pass",
            ),
        ),
        (f"{SCHEDULES}::test_a_lagged_run_stops_cleanly_and_goes_on[1-2]",),
    ),
    Mutation(
        "28",
        "steps after the checkpoint stay in the record",
        (
            (
                "loops/resume.py",
                "run.folder.store.rewind(run.step)",
                "run.folder.store.rewind(run.max_steps)",
            ),
        ),
        (f"{RESUME}::test_every_way_of_training_resumes_bit_equal[entropy bonus]",),
    ),
    Mutation(
        "29",
        "contents of a checkpoint are not compared",
        (
            (
                "runs/checkpoints.py",
                "good.append(_read(path, verify))",
                "good.append(_read(path, False))",
            ),
        ),
        ("tests/unit/runs/test_checkpoints.py::test_a_damaged_one_is_skipped_and_named",),
    ),
    Mutation(
        "29",
        "an answer that was paid for counts before it is on the disk",
        (
            (
                "generation/journal.py",
                "            os.fsync(self._file.fileno())\n        self._answers.add(line)",
                "        self._answers.add(line)",
            ),
        ),
        (f"{GENERATION}/test_journal.py::test_an_answer_is_on_the_disk_when_append_returns",),
    ),
    Mutation(
        "29",
        "the next answer is written behind a torn one",
        (("generation/journal.py", "self._file.truncate(whole)", "assert whole >= 0"),),
        (f"{GENERATION}/test_journal.py::test_a_torn_end_is_cut_off_wherever_it_is_torn",),
    ),
    Mutation(
        "26",
        "rows that are equal get each other's generations",
        (("generation/prompts.py", 'f"{told} {seen[told]}"', "told"),),
        (f"{GENERATION}/test_generate_prompts.py::test_a_key_is_the_rows_and_no_others",),
    ),
    Mutation(
        "29",
        "a column that is added has every answer paid for again",
        (
            (
                "generation/prompts.py",
                "canonical(prompt), canonical(sampling)]",
                "canonical(prompt), canonical(sampling), canonical(columns)]",
            ),
        ),
        (
            f"{GENERATION}/test_generate_prompts.py"
            "::test_a_key_is_that_of_the_request_whatever_else_a_row_holds",
        ),
    ),
    Mutation(
        "30",
        "rewards that cannot score anything empty the training rows that are there",
        (
            (
                "generation/results.py",
                "if not left_unjudged(config, counts):",
                "if config.num_generations:",
            ),
        ),
        (
            f"{GENERATION}/test_generate_results.py"
            "::test_what_trained_stays_where_nothing_could_be_scored",
        ),
    ),
    Mutation(
        "30",
        "a service's text is scored as if it had no tokens, by the rewards that count them",
        (
            (
                "generation/scoring.py",
                "return replace(made, rubric=without_tokens(made.rubric)[0])",
                "return made",
            ),
        ),
        (f"{GENERATION}/test_scoring.py::test_wordle_is_scored_without_its_part_for_length",),
    ),
    Mutation(
        "30",
        "the first turn of a game is paid for and scored as if it were the whole",
        (("generation/prompts.py", 'if task.has("get_environment"):', "if task.spec is None:"),),
        (f"{GENERATION}/test_generate_prompts.py::test_a_task_that_answers_in_turns_is_refused",),
    ),
    Mutation(
        "30",
        "a worker that was killed is not reaped",
        (
            (
                "rewards/pool.py",
                "        with suppress(subprocess.TimeoutExpired):\n"
                "            self._process.wait(_REAP_LIMIT)\n"
                "        self._socket.close()\n",
                "        self._socket.close()\n",
            ),
        ),
        (
            "tests/unit/rewards/test_workers.py::test_hanging_call_is_timed_out_and_the_next_one_served[hangs]",
        ),
    ),
    Mutation(
        "30",
        "a sandbox opens every file",
        (
            (
                "rewards/sandbox_kernel.py",
                '_raw("landlock_restrict_self", ruleset, 0)',
                "pass",
            ),
        ),
        ("tests/unit/rewards/test_sandbox.py::test_files_of_others_are_closed",),
    ),
    Mutation(
        "30",
        "a sandbox does not notice that whoever started it is gone",
        (
            (
                "rewards/sandbox_child.py",
                "            if control in ready:",
                "            if control is None:",
            ),
        ),
        (
            "tests/unit/rewards/test_sandbox.py::test_it_ends_when_whoever_started_it_is_killed[all]",
        ),
    ),
    Mutation(
        "30",
        "what is not the fault of model-written code is a reward of 0",
        (
            (
                "rewards/python_tests.py",
                'return Failed(f"could not run the tests: {error}")',
                "return Verdict(0, 1, str(error))",
            ),
        ),
        (
            "tests/unit/rewards/test_python_tests.py::"
            "test_what_is_not_the_codes_fault_fails_its_rollout_alone",
        ),
    ),
    Mutation(
        "30",
        "an answer without a verdict is the lowest score",
        (
            (
                "rewards/judge.py",
                "        placed = score if isinstance(score, Failed) else (score - low) / (high - low)\n",
                "        placed = 0.0 if isinstance(score, Failed) else (score - low) / (high - low)\n",
            ),
        ),
        (
            "tests/unit/rewards/test_judge.py::test_what_cannot_be_read_is_asked_for_once_more_and_fails",
            "tests/unit/rewards/test_judge.py::test_a_service_that_does_not_answer_fails_its_completions_alone",
        ),
    ),
    Mutation(
        "31",
        "an object of model-written code says itself that it is what a test expects",
        (
            (
                "rewards/boxed_tests.py",
                "return _ask(self, do, other) if isinstance(other, Remote) else NotImplemented",
                "return _ask(self, do, other)",
            ),
        ),
        ("tests/unit/rewards/test_python_tests.py::test_an_attack_earns_nothing",),
    ),
    Mutation(
        "31",
        "tests that any code would pass are taken",
        (
            (
                "rewards/boxed_tests.py",
                "        if not any(step.is_test for step in steps):\n",
                "        if not steps:\n",
            ),
        ),
        (
            "tests/unit/rewards/test_python_tests.py::"
            "test_tests_that_any_code_would_pass_are_refused_before_the_run",
        ),
    ),
    Mutation(
        "31",
        "a judge's verdict counts without the mark of its question",
        (
            (
                "rewards/judge_prompts.py",
                'if each.get("id") == self.mark]',
                'if "id" in each]',
            ),
        ),
        ("tests/unit/rewards/test_judge.py::test_a_verdict_in_a_completion_is_no_verdict",),
    ),
    Mutation(
        "30",
        "an exception of a reward reaches the loop",
        (
            (
                "rewards/calling.py",
                "    except (Exception, SystemExit) as error:  # noqa",
                "    except TypeError as error:  # noqa",
            ),
        ),
        ("tests/unit/rewards/test_rubric.py::test_exceptions_fail_the_call_and_nothing_else",),
    ),
    Mutation(
        "30",
        "a list of the wrong length is taken",
        (
            (
                "rewards/calling.py",
                "    if len(entries) != count:\n        raise _Unusable",
                "    if not entries:\n        raise _Unusable",
            ),
        ),
        ("tests/unit/rewards/test_rubric.py::test_wrong_answers_fail_the_whole_call",),
    ),
    Mutation(
        "30",
        "a row whose label is unknown has the rewards of another task",
        (
            (
                "rewards/router.py",
                "        if said is not None and said not in self._outer:\n",
                "        if said is not None and self.default is None:\n",
            ),
        ),
        ("tests/unit/rewards/test_router.py::test_an_unknown_label_gets_no_other_rewards",),
    ),
    Mutation(
        "31",
        "the first answer tag counts",
        (("rewards/tags.py", "found[-1].strip()", "found[0].strip()"),),
        ("tests/unit/rewards/test_tags.py::test_the_last_pair_of_answer_tags_counts",),
    ),
    Mutation(
        "31",
        "the name of a tag is a pattern",
        (
            (
                "rewards/tags.py",
                "opened, closed = map(re.escape, marks(tag))",
                "opened, closed = marks(tag)",
            ),
        ),
        ("tests/unit/rewards/test_tags.py::test_a_name_is_text_and_no_pattern",),
    ),
    Mutation(
        "31",
        "an empty gold answer is one",
        (("rewards/gold.py", "(form for form in forms if form)", "(forms)"),),
        (
            "tests/unit/rewards/test_gold.py::test_a_row_without_gold_is_refused_with_the_columns_there_are",
        ),
    ),
    Mutation(
        "31",
        "a heading in the middle of a text marks its answer",
        (
            (
                "rewards/gold.py",
                'if not stands_alone or "\\n" in answer or',
                "if not stands_alone or",
            ),
        ),
        ("tests/unit/rewards/test_gold.py::test_the_mark_stands_before_the_end",),
    ),
    Mutation(
        "31",
        "any words behind a number are its unit",
        (
            (
                "rewards/canonical.py",
                "return _NO_UNIT.isdisjoint(_singular(word)",
                "return set().isdisjoint(_singular(word)",
            ),
        ),
        ("tests/unit/rewards/test_canonical.py::test_what_does_not",),
    ),
    Mutation(
        "31",
        "digits beside the letters of the gold answer are nothing",
        (("rewards/crossword.py", "in exact and not _other_signs(answer)", "in exact"),),
        ("tests/unit/rewards/test_crossword.py::test_pure_accuracy_adds_up",),
    ),
    Mutation(
        "31",
        "a rubric in the prompt may be repeated in another order",
        (("rewards/overlap.py", "and stands_in(rubric, prompt):", "and not prompt:"),),
        (
            "tests/unit/rewards/test_overlap.py::test_a_rubric_in_the_prompt_leaves_the_likeness_of_what_is_not_copied",
        ),
    ),
    Mutation(
        "31",
        "an empty pair of tags counts",
        (
            (
                "rewards/formats.py",
                "empty |= {place, opened[pair].pop()}",
                "opened[pair].pop()",
            ),
        ),
        ("tests/unit/rewards/test_formats.py::test_tags_that_occur_once",),
    ),
    Mutation(
        "31",
        "a number is told by its letters, of which it has none",
        (
            (
                "rewards/crossword.py",
                "if not found or _other_signs(gold):",
                "if not gold:",
            ),
        ),
        ("tests/unit/rewards/test_crossword.py::test_what_letters_cannot_tell_is_refused",),
    ),
    Mutation(
        "31",
        "a word within another word stands by itself",
        (("rewards/crossword.py", 'f" {words} " in f" {there} "', "words in there"),),
        (
            "tests/unit/rewards/test_crossword.py::test_a_gold_answer_within_another_word_is_none_in_the_mode_word",
        ),
    ),
    Mutation(
        "31",
        "the letters of a word are factors",
        (("rewards/mathematics.py", " or in_words(bare)", ""),),
        ("tests/unit/rewards/test_mathematics.py::test_what_is_wrong_however_alike_it_looks",),
    ),
    Mutation(
        "31",
        "whole numbers may be off by a millionth",
        (("rewards/canonical.py", "return rounded and not whole and ", "return rounded and "),),
        ("tests/unit/rewards/test_canonical.py::test_what_does_not",),
    ),
    Mutation(
        "31",
        "an echo of the prompt is an answer",
        (
            (
                "rewards/overlap.py",
                "set(own_words(written, asked, run))",
                "set(own_words(written, asked, 0))",
            ),
        ),
        (
            "tests/unit/rewards/test_overlap.py::test_an_echo_of_a_rubric_in_the_prompt_wins_nothing",
        ),
    ),
    Mutation(
        "31",
        "a letter that is green in Wordle makes another one yellow",
        (
            (
                "tasks/wordle_rules.py",
                "left = [letter for letter, own in zip(secret, guess, strict=True) if letter != own]",
                "left = list(secret)",
            ),
        ),
        (
            "tests/unit/tasks/test_wordle_rules.py::test_greens_take_their_letters_first_then_yellows_from_left_to_right",
        ),
    ),
    Mutation(
        "31",
        "a guess that was only thought of counts",
        (("tasks/wordle_rules.py", "_GUESS.search(text, closing.end())", "_GUESS.search(text)"),),
        (
            "tests/unit/tasks/test_wordle_rules.py::test_the_guess_is_the_first_well_formed_one_after_the_closing_tag",
            "tests/unit/tasks/test_wordle.py::test_rewards",
        ),
    ),
    Mutation(
        "31",
        "letters that are no word satisfy what is known",
        (
            (
                "tasks/wordle.py",
                "    if guess not in real:\n        return Verdict(guess, repeated=repeated)\n",
                "",
            ),
        ),
        ("tests/unit/tasks/test_wordle.py::test_rewards",),
    ),
    Mutation(
        "31",
        "every row is played on the board of the first",
        (("rewards/rush_hour.py", "            board,\n", "            [board[0]] * count,\n"),),
        (f"{RUSH_HOUR}::test_each_row_has_its_own_board_gold_and_target",),
    ),
    Mutation(
        "31",
        "every row has the target of the first",
        (
            (
                "rewards/rush_hour.py",
                'columns.get("moves") or nothing,',
                '[columns["moves"][0]] * count if "moves" in columns else nothing,',
            ),
        ),
        (f"{RUSH_HOUR}::test_each_row_has_its_own_target",),
    ),
    Mutation(
        "31",
        "every row's answer has as many letters as that of the first",
        (
            (
                "rewards/crossword.py",
                "{name: values[at] for name, values in said.items()}",
                "{name: values[0] for name, values in said.items()}",
            ),
        ),
        ("tests/unit/rewards/test_crossword.py::test_each_row_has_its_own_expected_length",),
    ),
    Mutation(
        "31",
        "a number is the digits that stand before signs which nobody reads",
        (("rewards/mathematics.py", "if _has_unread_signs(bare):", "if not bare:"),),
        ("tests/unit/rewards/test_mathematics.py::test_what_is_wrong_however_alike_it_looks",),
    ),
    Mutation(
        "31",
        "the exponent of a formula counts by its bits and not by its value",
        (("rewards/formulas.py", "return 2.0**bits.numerator", "return bits.numerator"),),
        ("tests/unit/rewards/test_formulas.py::test_formulas_that_may_come_to_more_are_not",),
    ),
    Mutation(
        "31",
        "a guess that is no real word is never a repeated one",
        (
            (
                "tasks/wordle.py",
                "return Verdict(guess, repeated=repeated)",
                "return Verdict(guess)",
            ),
        ),
        (
            "tests/unit/tasks/test_wordle.py::test_a_guess_is_repeated_whether_it_is_a_real_word_or_not",
            "tests/unit/tasks/test_wordle_game.py::test_parts_of_a_game",
        ),
    ),
    Mutation(
        "31",
        "a clue is kept though the reward cannot read its answer",
        (
            (
                "tasks/crossword.py",
                'if unscorable := _unscorable({"answer": answer}):',
                'if unscorable := not letters(answer) and ValueError("no letters"):',
            ),
        ),
        (
            "tests/unit/tasks/test_crossword.py::test_rows_that_cannot_be_used_are_counted_or_refused",
        ),
    ),
    Mutation(
        "31",
        "an answer beside other signs counts as right in the metrics alone",
        (
            (
                "tasks/crossword.py",
                "correct = [value == 1 for value in values]",
                "correct = [answer == gold for answer, gold in pairs]",
            ),
        ),
        ("tests/unit/tasks/test_crossword.py::test_the_accuracy_is_that_of_the_reward",),
    ),
    Mutation(
        "31",
        "a board is solved by any car at the right edge",
        (
            (
                "rewards/rush_hour.py",
                "cars[LEAVING][-1] % board.size",
                "cars[move.car][-1] % board.size",
            ),
        ),
        (f"{RUSH_HOUR}::test_it_is_a_that_leaves",),
    ),
    Mutation(
        "31",
        "steps of one car are joined before they are played",
        (
            (
                "rewards/rush_hour.py",
                "        played = play(board, moves)\n        given",
                "        played = play(board, moves := merged(moves))\n        given",
            ),
        ),
        (f"{RUSH_HOUR}::test_shaped",),
    ),
    Mutation(
        "31",
        "gold solutions with the names of another board are taken",
        (
            (
                "rewards/rush_hour.py",
                "        if not played.solved or played.legal < played.begun:\n",
                "        if not moves:\n",
            ),
        ),
        (f"{RUSH_HOUR}::test_a_gold_solution_that_does_not_solve_its_own_board_is_refused",),
    ),
    Mutation(
        "31",
        "the clues of an answer go to several splits",
        (
            (
                "tasks/crossword.py",
                'by_answer.setdefault(letters(row["answer"]), [])',
                'by_answer.setdefault(row["clue"], [])',
            ),
        ),
        ("tests/unit/tasks/test_crossword.py::test_no_answer_and_no_clue_is_in_two_splits",),
    ),
    Mutation(
        "31",
        "an answer that a grader stumbles over fails its rollout",
        (
            (
                "tasks/reasoning_gym.py",
                "        _check_entry(grade, entry)\n        return 0.0\n",
                "        raise\n",
            ),
        ),
        (
            "tests/unit/tasks/test_reasoning_gym.py::test_an_answer_that_the_grader_stumbles_over_earns_nothing",
        ),
    ),
    Mutation(
        "31",
        "graders evaluate whatever a model writes",
        (
            (
                "tasks/reasoning_gym.py",
                "    if not is_harmless(answer, name):\n        return 0.0\n",
                "",
            ),
        ),
        (
            "tests/unit/tasks/test_reasoning_gym_answers.py::test_graders_that_evaluate_answers_get_no_code",
        ),
    ),
    Mutation(
        "31",
        "the rubric that an answer is paid by stands in the prompt",
        (
            (
                "tasks/rubric_answers.py",
                "if own.rubric_in_prompt else question",
                "if not own.rubric_in_prompt else question",
            ),
        ),
        (
            "tests/unit/tasks/test_rubric_answers.py::test_prompt_has_the_question_and_not_the_rubric",
        ),
    ),
    Mutation(
        "31",
        "validation rows are also trained on",
        (
            (
                "tasks/sort_words.py",
                'others = {frozenset(row["words"]) for row in _rows(own)}',
                "others: set[frozenset[str]] = set()",
            ),
        ),
        ("tests/unit/tasks/test_sort_words.py::test_no_set_of_words_occurs_twice",),
    ),
    Mutation(
        "32",
        "pass@k is the chance of k independent tries",
        (
            (
                "evaluation/statistics.py",
                "return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)",
                "return 1.0 - (1.0 - successes / samples) ** k",
            ),
        ),
        (
            "tests/unit/evaluation/test_statistics.py::test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not",
        ),
    ),
    Mutation(
        "32",
        "the answers that math_answer reads are not recorded, so that whole texts vote",
        (
            (
                "rewards/mathematics.py",
                "        record_answers(log_extra, (spelt_answer(text, self.answer_tag) for text in texts))\n",
                "",
            ),
        ),
        (
            "tests/unit/evaluation/test_evaluate.py::test_the_vote_on_a_task_counts_answers_however_they_were_found",
        ),
    ),
    Mutation(
        "32",
        "tasks whose rewards record no answer have none to vote with, because another task's do",
        (
            (
                "evaluation/measures.py",
                "notes.get(_origin(group.example))",
                "next(iter(notes.values()), None)",
            ),
        ),
        (
            "tests/unit/evaluation/test_measures.py::test_rewards_of_one_label_record_answers_and_those_of_another_need_not",
        ),
    ),
    Mutation(
        "32",
        "the accuracy of one task of a mixture stands on the prompts of all",
        (
            (
                "evaluation/evaluate.py",
                "wilson(self.metrics[metric], self._behind[metric])",
                "wilson(self.metrics[metric], self.prompts)",
            ),
        ),
        (
            "tests/unit/evaluation/test_evaluate.py::test_an_interval_of_one_task_stands_on_its_own_prompts",
        ),
    ),
    Mutation(
        "32",
        "an evaluation seeds the generator of the training",
        (
            (
                "evaluation/evaluate.py",
                "    rows = rows_of(groups, asked.success)\n",
                "    __import__('torch').manual_seed(0)\n    rows = rows_of(groups, asked.success)\n",
            ),
        ),
        (
            "tests/integration/test_evaluation_apart.py::test_generators_and_modes_stay_as_they_were",
        ),
    ),
    Mutation(
        "10",
        "a failed rollout counts as one that earned 0 where the reward is watched",
        (
            (
                "data/symptoms.py",
                "[(rollout, rollout.reward) for rollout in group.scored if rollout.reward is not None]",
                "[(rollout, rollout.reward or 0.0) for rollout in group.rollouts]",
            ),
        ),
        (
            "tests/unit/data/test_symptoms.py::test_failed_members_show_what_they_wrote_and_earn_nothing",
        ),
    ),
    Mutation(
        "28",
        "a resumed run forgets what was usual at its start, and warns of other things",
        (("loops/run.py", "self.signals.load_state(known)", "pass"),),
        (f"{RESUME}::test_every_way_of_training_resumes_bit_equal[warned of]",),
    ),
    Mutation(
        "28",
        "warnings of steps that are done again stay in the record",
        (
            (
                "runs/store.py",
                'self._db.execute("DELETE FROM warnings WHERE step > ?", (to_step,))',
                "pass",
            ),
        ),
        ("tests/unit/runs/test_store.py::TestRewind::test_drops_warnings_of_later_steps",),
    ),
    Mutation(
        "24",
        "a merged head takes the embeddings along that it is tied to",
        (("models/export.py", "            _untie(base, layer)", "            pass"),),
        (f"{EXPORT}::test_an_adapter_on_a_tied_head_leaves_the_embeddings_alone",),
    ),
    Mutation(
        "24",
        "an adapter is merged without its scale",
        (("models/export.py", "change = scaling * (up @ down)", "change = up @ down"),),
        (f"{EXPORT}::test_unmerged_merged_and_reloaded_by_peft_give_the_same_logits",),
    ),
    Mutation(
        "28",
        "a sink is sent again what benchmarks found, once a run goes on",
        (
            (
                "callbacks/reporting.py",
                "{key: line for key, line in noted.get(name, {}).items() if line <= last}",
                "{key: line for key, line in noted.get(name, {}).items() if line < 0}",
            ),
        ),
        (f"{REPORTING}::test_over_a_resume_each_of_them_is_sent_once",),
    ),
    Mutation(
        "28",
        "what benchmarks found, and a sink lost in a crash, is never sent to it",
        (
            (
                "callbacks/reporting.py",
                "{key: line for key, line in noted.get(name, {}).items() if line <= last}",
                "dict(noted.get(name, {}))",
            ),
        ),
        (f"{REPORTING}::test_over_a_resume_each_of_them_is_sent_once",),
    ),
    Mutation(
        "28",
        "a run whose benchmarks were left by Ctrl-C counts as finished, so that nobody makes them",
        (
            (
                "loops/outcome.py",
                "    if run.callbacks.left:\n        state",
                "    if False:\n        state",
            ),
        ),
        (
            "tests/integration/test_benchmarks.py::test_what_a_finished_run_waits_for_is_made_by_a_resume",
        ),
    ),
    Mutation(
        "28",
        "two that upload checkpoints share a queue",
        (
            (
                "models/hub_queue.py",
                'Queue(run / QUEUES / quote(name, safe="@"))',
                'Queue(run / QUEUES / "all")',
            ),
        ),
        ("tests/unit/models/test_hub_push.py::test_who_uploads_elsewhere_has_a_queue_of_its_own",),
    ),
    Mutation(
        "28",
        "a sink is sent again what it has since before a resume",
        (
            (
                "callbacks/reporting.py",
                "[name for name in self._sinks if line and self._held[name] < line.steps]",
                "list(self._sinks)",
            ),
        ),
        (f"{REPORTING}::test_a_resume_sends_what_is_missing_and_nothing_twice",),
    ),
    Mutation(
        "28",
        "half a line that a killed process left stays in the file of metrics",
        (
            (
                "callbacks/jsonl_sink.py",
                "if size < file.stat().st_size:",
                "if size > file.stat().st_size:",
            ),
        ),
        (f"{JSONL_SINK}::test_half_a_line_is_cut_off_with_its_rollouts",),
    ),
    Mutation(
        "28",
        "lines of steps that are drawn again stay in the file of metrics",
        (("callbacks/jsonl_sink.py", "not held <= steps <= last", "not held <= steps"),),
        (f"{JSONL_SINK}::test_steps_that_are_drawn_again_are_written_again",),
    ),
    Mutation(
        "28",
        "MLflow gets metrics again that a killed process had sent of its last line",
        (("callbacks/mlflow_sink.py", "if self._reached.get(name) != line.steps", "if name"),),
        (f"{MLFLOW_SINK}::test_of_a_line_that_was_cut_short_only_the_rest_is_sent",),
    ),
    Mutation(
        "28",
        "a run that was killed before its first line gets a second one in MLflow",
        (("callbacks/mlflow_sink.py", "tags={self._tag: str(NOTHING)},", "tags={},"),),
        (f"{MLFLOW_SINK}::test_the_tag_comes_after_its_line",),
    ),
    Mutation(
        "32",
        "questions of a suite that got no answer count as wrong ones",
        (
            (
                "suites/lighteval.py",
                "if missing := log.read_bytes().count(UNANSWERED):",
                "if missing := log.read_bytes().count(b'no such line'):",
            ),
        ),
        (f"{SUITES}::test_answers_that_do_not_come_are_no_wrong_answers",),
    ),
    Mutation(
        "32",
        "a key that a service repeats stays in the log of a suite",
        (
            (
                "suites/family.py",
                "if self._secret is not None and self._secret.encode() in (said := self.log.read_bytes()):",
                "if self._secret is None and b'' in (said := self.log.read_bytes()):",
            ),
        ),
        (f"{SUITES}::test_answers_that_do_not_come_are_no_wrong_answers",),
    ),
    Mutation(
        "32",
        "what a suite's server started outlives whoever asked for it",
        (
            (
                "suites/tied.py",
                "    tie_to_parent(int(sys.argv[1]), sys.argv[2])\n",
                "",
            ),
        ),
        (f"{SUITES}::test_everything_ends_with_who_began_it",),
    ),
    Mutation(
        "35",
        "what a part loses is measured against the weighted gain of the part that eats it",
        (
            (
                "data/suspicions.py",
                "_lost(gain, sight.least.get(other)) / LOST,",
                "(gain.mean - gain.now) / (0.25 * abs(gains[name].now - gains[name].mean) or 1.0),",
            ),
        ),
        (
            "tests/unit/data/test_signals.py::test_a_light_part_that_a_heavy_one_eats",
            "tests/unit/data/test_signals.py::test_a_loss_is_a_share_of_what_was_there",
        ),
    ),
    Mutation(
        "35",
        "what moves within the start of a run counts as noise of its steps",
        (
            (
                "data/gauge.py",
                "variance = squares / (2 * (count - 1)) if count > 1 else 0.0",
                "variance = sum((v - self.mean) ** 2 for v in self.start) / max(count - 1, 1)",
            ),
        ),
        ("tests/unit/data/test_signals.py::test_a_move_that_begins_within_the_start_is_told",),
    ),
    Mutation(
        "35",
        "a threshold is about a reward part that nobody gives",
        (
            (
                "loops/rl_prepare.py",
                "        check_part(key, part, rubric.names if rubric else (), task.described)\n",
                "        pass\n",
            ),
        ),
        (
            "tests/integration/test_selection.py::test_a_part_that_would_never_be_solved_is_refused_before_the_model_is_loaded",
        ),
    ),
    Mutation(
        "24",
        "the best weights are called by the last step",
        (("runs/find.py", "if found is None else found", "if True else found"),),
        ("tests/unit/runs/test_find.py::TestFinal::test_its_weights_need_not_be_the_last_ones",),
    ),
    Mutation(
        "24",
        "a run replaces on the hub what somebody else has put in place of its own upload",
        (
            (
                "models/hub_push.py",
                "if own is None or _head(api, target) != own:",
                "if own is None:",
            ),
        ),
        (f"{HUB_PUSH}::test_what_somebody_else_has_changed_since_is_left_as_it_is",),
    ),
    Mutation(
        "24",
        "what is to be private is put into a public repository",
        (
            (
                "models/hub_push.py",
                "if target.private and not api.repo_info(target.repo_id).private:",
                "if False:",
            ),
        ),
        (f"{HUB_PUSH}::test_a_public_repository_is_refused_unless_that_is_said",),
    ),
    Mutation(
        "33",
        "a second post of other rewards takes the place of the first",
        (
            (
                "server/ledger/rewards.py",
                "    if group.rewards is not None:\n        return _again(transaction, group, post)\n",
                "",
            ),
        ),
        (f"{SERVICE}::test_the_same_rewards_are_accepted_once_and_others_are_refused",),
    ),
    Mutation(
        "33",
        "groups that are rewarded are no longer counted as under way",
        (
            (
                "server/steps.py",
                'UNDER_WAY: tuple[State, ...] = ("open", "rewarded", "planned")',
                'UNDER_WAY: tuple[State, ...] = ("open",)',
            ),
        ),
        (f"{SERVICE}::test_a_rewarded_group_takes_room_until_it_is_trained",),
    ),
    Mutation(
        "33",
        "steps after the checkpoint are not taken again",
        (
            (
                "server/conductor.py",
                "                exact = await self._take(engine, plan) and exact\n",
                "                pass\n",
            ),
        ),
        (f"{RECOVERY}::test_the_engine_dies_at_every_point",),
    ),
    Mutation(
        "33",
        "a step that the engine has committed is forgotten with it",
        (
            (
                "server/conductor.py",
                "                await self._ledger.do(steps.note_committed, opened.run, manifest, metrics)\n",
                "                assert metrics is not None\n",
            ),
        ),
        (
            "tests/unit/server/test_recovery.py::test_what_was_committed_is_known_to_the_next_server",
        ),
    ),
    Mutation(
        "33",
        "a step is trained in the order in which its rewards came",
        (
            (
                "server/steps.py",
                """    rewarded = sorted(groups.groups_in(transaction, run, ("rewarded",)), key=lambda row: row.draw)""",
                """    rewarded = groups.groups_in(transaction, run, ("rewarded",))""",
            ),
        ),
        (f"{SERVICE}::test_a_step_is_trained_in_the_order_of_its_draws",),
    ),
    Mutation(
        "33",
        "a plan is tried for ever",
        (("server/steps.py", "MOST_LOSSES = 2", "MOST_LOSSES = 1000"),),
        (f"{RECOVERY}::test_a_plan_that_ends_the_engine_twice_is_put_aside_and_the_run_goes_on",),
    ),
    Mutation(
        "33",
        "completions get new weights while they are being written",
        (("server/engine/served_run.py", "        await self.gate.close()\n", "        pass\n"),),
        ("tests/integration/server/test_engine_core.py::test_a_group_is_sampled_by_one_policy",),
    ),
    Mutation(
        "36",
        "a call that comes again is done again",
        (
            (
                "server/parts/calls.py",
                "        call = self._calls.get(number)\n        if call is None:\n            call = self._begun",
                "        call = None\n        if call is None:\n            call = self._begun",
            ),
        ),
        (f"{PARTS}::test_a_call_that_comes_again_is_done_once",),
    ),
    Mutation(
        "36",
        "calls of the learner are done as they arrive",
        (("server/parts/calls.py", "while not self._is_over(number):", "while False:"),),
        (f"{PARTS}::test_calls_that_overtake_each_other_are_done_in_order",),
    ),
    Mutation(
        "36",
        "a call that never came holds up those after it",
        (
            (
                "server/parts/calls.py",
                "None, ordered=True)\n            self._note_over(number)\n",
                "None, ordered=True)\n",
            ),
        ),
        (f"{PARTS}::test_what_is_given_up_holds_nobody_up",),
    ),
    Mutation(
        "36",
        "an answer that was told is forgotten after a while, and its call done again",
        (
            (
                "server/parts/calls.py",
                "if call.ordered and number <= self._named:",
                "if call.ordered and call.told is not None and call.told < before:",
            ),
            ("server/parts/calls.py", "if ordered and number <= self._forgotten:", "if False:"),
        ),
        (f"{PARTS}::test_an_answer_that_was_told_and_lost_is_told_again_however_late",),
    ),
    Mutation(
        "36",
        "what never came lets those after it overtake what is under way",
        (
            (
                "server/parts/calls.py",
                "if self._reached < number:\n            return False\n        return all(",
                "if self._reached < number:\n            return False\n        return True or all(",
            ),
        ),
        (f"{PARTS}::test_what_never_came_holds_its_place_behind_what_is_under_way",),
    ),
    Mutation(
        "36",
        "the next call of the learner does not say which one it follows",
        (
            (
                "remote/session.py",
                "after, self._last = self._last, number",
                "after, self._last = 0, number",
            ),
        ),
        (f"{SESSION}::test_what_is_cancelled_is_given_up_and_the_next_call_comes_after_it",),
    ),
    Mutation(
        "36",
        "what is not finite is lost on its way",
        (("server/routes/parts.py", 'inf_nan_mode="strings"', 'inf_nan_mode="null"'),),
        (f"{SESSION}::test_over_a_bad_network_every_call_is_done_once",),
    ),
    Mutation(
        "36",
        "a path may lead out of the folder",
        (
            (
                "server/parts/files.py",
                "if len(path) > MAX_PATH or not _PATH.fullmatch(path):",
                "if len(path) > MAX_PATH:",
            ),
        ),
        ("tests/unit/server/parts/test_files.py::test_paths_that_lead_elsewhere_are_refused",),
    ),
    Mutation(
        "36",
        "files that were changed here are taken for those that the server has",
        (
            (
                "remote/sampler.py",
                "if known is not None and known.stamp == stamp_of(Path(policy.path)):",
                "if known is not None:",
            ),
        ),
        (f"{SAMPLERS}::test_weights_swapped_behind_its_back_are_refused[remote]",),
    ),
    Mutation(
        "36",
        "who falls silent keeps the model",
        (
            (
                "server/parts/service.py",
                "parts.seen < self._clock() - self._silence",
                "False",
            ),
        ),
        (f"{PARTS}::test_who_falls_silent_is_ended_and_told",),
    ),
)
