"""Everything `generate` of this transformers can be asked for, after an exact handoff: the model's
own result, or a refusal of one line that names the setting."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation.configuration_utils import CompileConfig

from kvbridge import Bridge, Handoff, Model, capture, generate_many
from kvbridge.engines.taken import ARGUMENTS, DECIDED, REFUSED, SETTINGS
from kvbridge.errors import UsageError
from tests.models import TEXT, tiny, tiny_causal, wrapped

PROMPT = TEXT[:130]
NEW = 12
KINDS = ("llama", "gemma3", "gpt2")
SAMPLED = {"do_sample": True, "temperature": 1.5}
ENDING = {"eos_token_id": [5, 17, 40, 120, 200, 260, 300]}
FIELDS: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 90, "eos_token_id": 1}],
    "max_new_tokens": [{"max_new_tokens": 3}],
    "min_length": [{"min_length": 75, **ENDING}],
    "min_new_tokens": [{"min_new_tokens": 9, **ENDING}],
    "early_stopping": [{"early_stopping": True, "num_beams": 3, **ENDING}],
    "max_time": [{"max_time": 1000.0}],
    "stop_strings": [{"stop_strings": ["e", "th"]}],
    "do_sample": [{"do_sample": True}],
    "num_beams": [{"num_beams": 3}, {"num_beams": 3, **SAMPLED}],
    "use_cache": [{"use_cache": True}],
    "cache_implementation": [
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "hybrid"},
    ],
    "cache_config": [{"cache_config": {"nbits": 4}}],
    "max_cache_len": [{"max_cache_len": 500}],
    "temperature": [SAMPLED],
    "top_k": [{"top_k": 4, **SAMPLED}],
    "top_p": [{"top_p": 0.7, **SAMPLED}],
    "min_p": [{"min_p": 0.1, **SAMPLED}],
    "top_h": [{"top_h": 0.4, **SAMPLED}],
    "typical_p": [{"typical_p": 0.6, **SAMPLED}],
    "epsilon_cutoff": [{"epsilon_cutoff": 0.01, **SAMPLED}],
    "eta_cutoff": [{"eta_cutoff": 0.01, **SAMPLED}],
    "repetition_penalty": [{"repetition_penalty": 1.8}],
    "encoder_repetition_penalty": [{"encoder_repetition_penalty": 1.8}],
    "length_penalty": [{"length_penalty": 2.0, "num_beams": 3, **ENDING}],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": 2}],
    "encoder_no_repeat_ngram_size": [{"encoder_no_repeat_ngram_size": 2}],
    "bad_words_ids": [{"bad_words_ids": [[7], [90, 91]]}],
    "renormalize_logits": [{"renormalize_logits": True, "num_beams": 2}],
    "forced_bos_token_id": [{"forced_bos_token_id": 9}],
    "forced_eos_token_id": [{"forced_eos_token_id": 9, "eos_token_id": 9}],
    "remove_invalid_values": [{"remove_invalid_values": True}],
    "exponential_decay_length_penalty": [
        {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 9}
    ],
    "suppress_tokens": [{"suppress_tokens": list(range(100, 300))}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": list(range(100, 300))}],
    "sequence_bias": [{"sequence_bias": [[[45], 9.0], [[46, 47], -9.0]]}],
    "guidance_scale": [{"guidance_scale": 1.7}, {"guidance_scale": 1.7, "num_beams": 2}],
    "watermarking_config": [
        {"watermarking_config": WatermarkingConfig(bias=4.0)},
        {
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 9, 27]),
            **SAMPLED,
        },
    ],
    "num_return_sequences": [
        {"num_return_sequences": 2, **SAMPLED},
        {"num_return_sequences": 2, "num_beams": 3},
    ],
    "output_attentions": [{"output_attentions": False, "return_dict_in_generate": True}],
    "output_hidden_states": [{"output_hidden_states": True}],
    "output_scores": [{"output_scores": True, "return_dict_in_generate": True}],
    "output_logits": [{"output_logits": True, "return_dict_in_generate": True, "num_beams": 2}],
    "return_dict_in_generate": [{"return_dict_in_generate": True, **SAMPLED}],
    "pad_token_id": [{"pad_token_id": 3, "num_return_sequences": 3, **SAMPLED, **ENDING}],
    "bos_token_id": [{"bos_token_id": 3}],
    "eos_token_id": [ENDING],
    "decoder_start_token_id": [{"decoder_start_token_id": 3}],
    "num_assistant_tokens": [{"num_assistant_tokens": 4}],
    "num_assistant_tokens_schedule": [{"num_assistant_tokens_schedule": "heuristic"}],
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.9}],
    "max_matching_ngram_size": [{"max_matching_ngram_size": 2}],
    "assistant_lookbehind": [{"assistant_lookbehind": 3}],
    "target_lookbehind": [{"target_lookbehind": 3}],
    "assistant_ensemble_weight": [{"assistant_ensemble_weight": 0.5}],
    "compile_config": [{"compile_config": CompileConfig()}],
    "disable_compile": [{"disable_compile": True}],
    "continuous_batching_config": [{}],
    "low_memory": [{"low_memory": True}],
    "diversity_penalty": [{"diversity_penalty": 0.5}],
    "prefill_chunk_size": [{"prefill_chunk_size": 7}],
    "transformers_version": [{}],
}
"""By field: settings that use it. They are given as arguments, in generation_config= and as the
model's own."""
CASES = [
    pytest.param(settings, id=f"{name}-{i}")
    for name, cases in FIELDS.items()
    if name in vars(GenerationConfig())
    for i, settings in enumerate(cases)
]


class Collected(TextStreamer):
    def __init__(self) -> None:
        super().__init__(tiny("llama").tokenizer)
        self.received: list[int] = []

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.received.append(-1)


class Favoured(LogitsProcessor):
    """The third token of the prompt, more and more."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, input_ids[0, 3]] += 0.2 * input_ids.shape[1]
        return scores


class Seven(StoppingCriteria):
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, input_ids, scores, **kwargs):
        done = input_ids.shape[1] >= self.prompt + 7
        return torch.full((len(input_ids),), done)


@cache
def model_of(kind: str) -> Model:
    return wrapped(tiny_causal(kind))


@cache
def handed(kind: str = "llama", prompt: str = PROMPT) -> Handoff:
    model = model_of(kind)
    handoff = Bridge(None, sender=model, receiver=model).handoff(capture(model, prompt), prompt)
    assert handoff.decision.reason == "exact"
    return handoff


def own(kind: str, **options: Any) -> Any:
    """What the model generates without a handoff."""
    model = model_of(kind)
    ids = handed(kind).ids[None]
    torch.manual_seed(11)
    if options.get("stop_strings") or (
        getattr(options.get("generation_config"), "stop_strings", None)
    ):
        options["tokenizer"] = model.tokenizer
    return model.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)


def after(kind: str, **options: Any) -> Any:
    torch.manual_seed(11)
    return handed(kind).generate(**options)


def assert_same(result: Any, expected: Any) -> None:
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(result, expected)
        return
    assert torch.equal(result.sequences, expected.sequences)
    for name in ("scores", "logits", "beam_indices", "sequences_scores"):
        values, wanted = getattr(result, name, None), getattr(expected, name, None)
        assert (values is None) == (wanted is None)
        if values is not None and wanted is not None:
            for value, want in zip(values, wanted, strict=True):
                torch.testing.assert_close(value, want, atol=1e-4, rtol=1e-4)
    for layer, want in zip(result.cache.layers, expected.cache.layers, strict=True):
        torch.testing.assert_close(layer.keys, want.keys, atol=1e-4, rtol=1e-4)


def with_length(settings: dict[str, Any]) -> dict[str, Any]:
    lengths = {"max_length", "max_new_tokens"} & set(settings)
    return dict(settings) if lengths else {"max_new_tokens": NEW, **settings}


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_every_field_of_this_transformers_is_decided():
    """A field that a new release adds has to be put into one of the two tables, and tried here."""
    fields = public(vars(GenerationConfig()))
    assert fields - set(SETTINGS) - set(REFUSED) == set()
    assert set(SETTINGS) & set(REFUSED) == {
        "use_cache",
        "cache_implementation",
        "output_attentions",
        "output_hidden_states",
    }
    assert set(SETTINGS) == set(FIELDS)


def test_every_argument_of_generate_is_decided():
    given = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert given - set(ARGUMENTS) - set(REFUSED) - set(DECIDED) == set()


@pytest.mark.parametrize("settings", CASES)
def test_given_as_arguments(settings):
    for kind in KINDS:
        asked = with_length(settings)
        assert_same(after(kind, **asked), own(kind, **asked))


@pytest.mark.parametrize("settings", CASES)
def test_given_in_a_generation_config(settings):
    asked = GenerationConfig(**with_length(settings))
    assert_same(after("gemma3", generation_config=asked), own("gemma3", generation_config=asked))


@pytest.mark.parametrize("settings", CASES)
def test_the_models_own(settings, monkeypatch):
    config = GenerationConfig(**with_length(settings))
    monkeypatch.setattr(model_of("gemma3").model, "generation_config", config)
    more = {"tokenizer": model_of("gemma3").tokenizer} if "stop_strings" in settings else {}
    assert_same(after("gemma3"), own("gemma3", **more))


def _processors(kind: str) -> dict[str, dict[str, Any]]:
    prompt = len(handed(kind).ids)
    return {
        "logits_processor": {"logits_processor": LogitsProcessorList([Favoured()])},
        "logits_processors_in_a_list": {"logits_processor": [Favoured()]},
        "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([Seven(prompt)])},
        "prefix_allowed_tokens_fn": {
            "prefix_allowed_tokens_fn": lambda _, ids: sorted({*ids.tolist(), 5})
        },
        "prefix_allowed_tokens_fn_beams": {
            "prefix_allowed_tokens_fn": lambda _, ids: sorted({*ids.tolist(), 5}),
            "num_beams": 3,
        },
        "negative_prompt": {
            "guidance_scale": 2.0,
            "negative_prompt_ids": torch.tensor([[7, 8, 9]]),
            "negative_prompt_attention_mask": torch.tensor([[1, 1, 1]]),
        },
        "stop_strings_with_tokenizer": {
            "stop_strings": "e",
            "tokenizer": model_of(kind).tokenizer,
        },
        "trust_remote_code": {"trust_remote_code": True},
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", _processors("llama"))
def test_arguments_beside_the_configuration(kind, name):
    options = {"max_new_tokens": NEW, **_processors(kind)[name]}
    assert_same(after(kind, **options), own(kind, **options))


@pytest.mark.parametrize("more", [{}, SAMPLED, ENDING], ids=["greedy", "sampled", "ending"])
def test_a_streamer_gets_what_it_would_have_got(more):
    streams = []
    for generate in (own, after):
        streamer = Collected()
        generate("gemma3", max_new_tokens=NEW, streamer=streamer, **more)
        streams.append(streamer.received)
    assert streams[0] == streams[1]


REFUSALS: dict[str, list[Any]] = {
    "use_cache": [False],
    "cache_implementation": [
        "static",
        "offloaded",
        "quantized",
        "offloaded_static",
        "sliding_window",
        "hybrid_chunked",
        "offloaded_hybrid",
        "offloaded_hybrid_chunked",
        "paged",
    ],
    "token_healing": [True],
    "use_mtp": [True],
    "prompt_lookup_num_tokens": [3],
    "assistant_early_exit": [2],
    "speculation_type": ["dflash"],
    "is_assistant": [True],
    "penalty_alpha": [0.6],
    "dola_layers": ["high", [1]],
    "num_beam_groups": [2],
    "constraints": [[object()]],
    "force_words_ids": [[[5]]],
    "output_attentions": [True],
    "output_hidden_states": [True],
}
ARGUMENT_REFUSALS: dict[str, Any] = {
    "assistant_model": lambda: tiny("llama", seed=3).model,
    "assistant_tokenizer": lambda: tiny("llama").tokenizer,
    "custom_generate": lambda: "transformers-community/dola",
    "synced_gpus": lambda: True,
}
_WITH: dict[str, dict[str, Any]] = {
    "num_beam_groups": {"num_beams": 4, "diversity_penalty": 0.4},
    "constraints": {"num_beams": 4},
    "force_words_ids": {"num_beams": 4},
    "output_attentions": {"return_dict_in_generate": True},
    "output_hidden_states": {"return_dict_in_generate": True},
}
REFUSED_CASES = [
    pytest.param(name, {name: value, **_WITH.get(name, {})}, id=f"{name}-{i}")
    for name, values in REFUSALS.items()
    for i, value in enumerate(values)
    if name in vars(GenerationConfig())
]


def test_every_refusal_is_tried():
    assert set(REFUSED) == set(REFUSALS) | set(ARGUMENT_REFUSALS)


def assert_refused(name: str, refused: Any) -> None:
    message = str(refused.value)
    assert message.startswith(f"{name}=")
    assert "\n" not in message


@pytest.mark.parametrize(("name", "settings"), REFUSED_CASES)
def test_refused_by_name(name, settings, monkeypatch):
    """From arguments and a generation_config; the model's own default, which `name=` undoes."""
    with pytest.raises(UsageError) as refused:
        after("llama", max_new_tokens=NEW, **settings)
    assert_refused(name, refused)
    with pytest.raises(UsageError) as refused:
        generate_many([handed(), handed(prompt=TEXT[:70])], NEW, **settings)
    config = GenerationConfig(max_new_tokens=NEW, **settings)
    with pytest.raises(UsageError) as refused:
        after("llama", generation_config=config)
    assert_refused(name, refused)
    if name == "use_cache":
        return
    monkeypatch.setattr(model_of("llama").model, "generation_config", config)
    with pytest.raises(UsageError) as refused:
        after("llama")
    assert_refused(name, refused)
    undone: dict[str, Any] = {name: False if name.startswith("output_") else None}
    assert f"{name}={undone[name]}" in str(refused.value)
    undone |= {n: None for n in ("num_beams", "return_dict_in_generate")}
    assert_same(after("llama", **undone), own("llama", **{**undone, "num_beams": 1}))


@pytest.mark.parametrize("name", ARGUMENT_REFUSALS)
def test_refused_arguments(name):
    for handoffs in ((handed(),), (handed(), handed(prompt=TEXT[:70]))):
        with pytest.raises(UsageError) as refused:
            generate_many(handoffs, NEW, **{name: ARGUMENT_REFUSALS[name]()})
        assert_refused(name, refused)
    with pytest.raises(UsageError) as refused:
        after("llama", **{name: ARGUMENT_REFUSALS[name]()})
    assert_refused(name, refused)


def test_a_function_that_replaces_decoding_is_refused():
    with pytest.raises(UsageError, match="custom_generate="):
        after("llama", custom_generate=lambda model, input_ids, **_: input_ids)


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 2},
        {"num_return_sequences": 4, "num_beams": 2},
        {"streamer": Collected(), "num_beams": 2},
        {"streamer": Collected(), "num_return_sequences": 2, "do_sample": True},
        {"max_length": 5},
        {"stop_strings": ["e"], "tokenizer": object()},
        {"temperature": 0.0, "do_sample": True},
        {"suppress_tokens": [9], "forced_eos_token_id": 9},
        {"watermarking_config": {"nothing": 1}},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"forced_eos_token_id": 10**6},
        {"bad_words_ids": [[10**6]]},
        {"pad_token_id": 10**6},
        {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[10**6]])},
        {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[5]]), "num_beams": 2},
        {"guidance_scale": 2.0, "negative_prompt_ids": [[5]]},
        {"generation_config": {"do_sample": True}},
        {"tempperature": 1.0},
        {"labels": None},
        {"logits_to_keep": 1},
        {"token_type_ids": None},
        {"logits_processor": Favoured()},
        {"stopping_criteria": Seven(3)},
        {"streamer": print},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_cannot_be_meant_is_one_line(options):
    with pytest.raises(UsageError) as refused:
        after("llama", **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(set(SETTINGS) & set(vars(GenerationConfig()))))
@pytest.mark.parametrize(
    "value",
    [-3, 2.5, "many", float("nan"), [], {}, [["x"]], b"bytes", object(), torch.tensor([0.5])],
    ids=lambda value: type(value).__name__,
)
def test_hostile_values(name, value):
    """Taken, or refused in one line; nothing of transformers' or torch's own."""
    message = ""
    try:
        after("llama", **{"max_new_tokens": 2, name: value, "do_sample": name != "do_sample"})
    except UsageError as refusal:
        message = str(refusal)
    assert "\n" not in message


def test_positions_that_run_out():
    """Learned positions are a table: what comes after its end is refused before anything runs."""
    model = wrapped(tiny_causal("gpt2", n_positions=40))
    ids = torch.arange(30)
    handoff = Bridge(None, sender=model, receiver=model).handoff(
        capture(model, input_ids=ids), input_ids=ids
    )
    longest = handoff.generate()
    assert longest.shape == (1, 41)
    assert torch.equal(longest, handoff.generate(11))
    with pytest.raises(UsageError, match="at most 11 new tokens"):
        handoff.generate(12)
    with pytest.raises(UsageError, match="at most 11 new tokens"):
        handoff.generate(max_length=50)


MANY = [PROMPT, TEXT[40:70], TEXT[10:150]]
MANY_CASES = [
    *CASES,
    pytest.param({"repetition_penalty": 1.8, "num_beams": 2}, id="penalty_beams"),
]


@pytest.mark.parametrize("settings", MANY_CASES)
def test_many_equal_each_alone(settings):
    """One draw serves a whole batch, so that sampled rows are compared for settings alone."""
    handoffs = [handed("gemma3", text) for text in MANY]
    asked = with_length(settings)
    refused = {"num_return_sequences", "return_dict_in_generate", "max_length"} & set(asked)
    if refused:
        with pytest.raises(UsageError, match="|".join(refused)):
            generate_many(handoffs, **asked)
        return
    rows = generate_many(handoffs, **asked)
    for row, handoff in zip(rows, handoffs, strict=True):
        if not asked.get("do_sample"):
            assert torch.equal(ended(row, asked), ended(handoff.generate(**asked)[0], asked))


def ended(row: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Without what a batch pads after the end of a sequence."""
    padding = settings.get("pad_token_id", 0)
    kept = len(row)
    while kept and int(row[kept - 1]) == padding:
        kept -= 1
    return row[:kept]


def test_text_is_of_one_continuation(monkeypatch):
    handoff = handed()
    plain = handoff.text(NEW)
    asked = {"return_dict_in_generate": True, "output_scores": True}
    assert handoff.text(NEW, **asked) == plain
    assert handoff.text(NEW, generation_config=GenerationConfig(**asked)) == plain
    with pytest.raises(UsageError, match="one continuation"):
        handoff.text(NEW, do_sample=True, num_return_sequences=2)
    config = GenerationConfig(num_beams=2, num_return_sequences=2)
    monkeypatch.setattr(model_of("llama").model, "generation_config", config)
    with pytest.raises(UsageError, match="one continuation"):
        handoff.text(NEW)
