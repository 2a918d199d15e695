"""Puts one bug at a time into a copy of the tree and runs the test that must notice it.

Run it as a script: `python tests/mutants.py [name ...]`; it exits 1 when a bug goes unnoticed. pytest does not collect
this file; tests/test_mutants.py checks that every mutant still applies.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("kvbridge", "fitting", "gates", "registry", "eval", "tests", "pyproject.toml")


@dataclass(frozen=True)
class Mutant:
    """`find` stands exactly once in `file`; with `replace` in its place, `test` must fail."""

    name: str
    file: str
    find: str
    replace: str
    test: str


MUTANTS = (
    Mutant(
        "rope_without_the_scale", "kvbridge/rope.py", "- turn(rotated) * sin) / scale_squared, rest)",
        "- turn(rotated) * sin), rest)", "tests/core/test_rope.py::test_yarn_scale_is_divided_out_twice",
    ),
    Mutant(
        "keys_and_values_swapped_in_a_snapshot", "kvbridge/snapshot.py",
        '{"k": _rows(k, rows), "v": _rows(v, rows)}', '{"v": _rows(k, rows), "k": _rows(v, rows)}',
        "tests/core/test_exact_handoff.py::test_same_model",
    ),
    Mutant(
        "keys_and_values_swapped_in_a_batch", "kvbridge/prefill.py",
        '{"k": keys, "v": v.transpose(1, 2).float()}', '{"v": keys, "k": v.transpose(1, 2).float()}',
        "tests/fitting/test_fit.py::test_scores_are_of_the_test_split_alone",
    ),
    Mutant(
        "alignment_by_spans_one_late", "kvbridge/align.py", "index = found.clamp_max(len(sender) - 1)",
        "index = (found + 1).clamp_max(len(sender) - 1)", "tests/core/test_align.py::test_equals_the_naive_loop",
    ),
    Mutant(
        "alignment_by_positions_one_late", "kvbridge/align.py",
        "torch.searchsorted(sender.contiguous(), receiver.contiguous()).clamp_max",
        "(torch.searchsorted(sender.contiguous(), receiver.contiguous()) + 1).clamp_max",
        "tests/core/test_align.py::test_positions",
    ),
    Mutant(
        "train_scores_as_test_scores", "fitting/pairs.py",
        'if batch.split == "test":\n                self._held.append((batch, load))\n            else:\n',
        'if batch.split == "train":\n                self._held.append((batch, load))\n            if batch.split != "test":\n',
        "tests/fitting/test_fit.py::test_scores_are_of_the_test_split_alone",
    ),
    Mutant(
        "validation_rows_fit_the_maps", "fitting/train.py", "_path(fitted, config) for fitted, _ in problems",
        "_path(fitted, config) for _, fitted in problems",
        "tests/fitting/test_select.py::test_validation_rows_do_not_enter_the_maps",
    ),
    Mutant(
        "splits_by_text", "fitting/data.py", 'document.group.encode("utf-8"', 'document.id.encode("utf-8"',
        "tests/fitting/test_data.py::test_splits_are_stable_and_follow_the_group",
    ),
    Mutant(
        "sinks_in_the_fit", "fitting/rows.py", "at = at[at >= config.sinks][:: config.stride]",
        "at = at[:: config.stride]", "tests/fitting/test_fit.py::test_stride_and_sinks_thin_the_rows",
    ),
    Mutant(
        "moments_not_centred", "fitting/moments.py", "xx -= self.n * torch.outer(dx, dx)", "pass",
        "tests/fitting/test_moments.py::test_equals_ridge_in_fp64",
    ),
    Mutant(
        "merge_keeps_the_others_shift", "fitting/moments.py", "mine[key] += theirs[key] + moved",
        "mine[key] += theirs[key]",
        "tests/fitting/test_moments.py::test_merging_in_any_order_and_nesting_equals_one_batch",
    ),
    Mutant(
        "rounded_shift_forgotten", "fitting/moments.py",
        "self._x_shift, self._y_shift = self._x_shift.float().double(), self._y_shift.float().double()", "pass",
        "tests/fitting/test_moments.py::test_equals_ridge_in_float32_with_a_mean_of_a_thousand_deviations",
    ),
    Mutant(
        "penalty_absolute", "fitting/train.py", "[x * scale for x in config.lambdas]", "list(config.lambdas)",
        "tests/fitting/test_select.py::test_penalty_is_relative_to_the_scale_of_the_inputs",
    ),
    Mutant(
        "token_only_reads_the_sender", "fitting/train.py", "(Group(heads, ()),), True",
        "(Group(heads, (Block(0, name),)),), True",
        "tests/fitting/test_select.py::test_the_token_only_control_reads_no_sender",
    ),
    Mutant(
        "scores_clipped", "fitting/scores.py", "torch.where(alive, 1 - squared / variation.clamp_min(1e-300), torch.nan)",
        "torch.where(alive, (1 - squared / variation.clamp_min(1e-300)).clamp_min(0), torch.nan)",
        "tests/fitting/test_scores.py::test_residuals_equal_a_plain_calculation_in_any_pieces",
    ),
    Mutant(
        "probe_left_in_place", "fitting/scores.py", "model.model.set_attn_implementation(before)", "pass",
        "tests/fitting/test_scores.py::test_the_probe_restores_the_attention_even_on_an_error",
    ),
    Mutant(
        "spilled_keys_rounded", "fitting/spill.py",
        "return small if torch.equal(small.to(tensor.dtype), tensor) else tensor", "return small",
        "tests/fitting/test_fit.py::test_one_model_at_a_time_gives_the_same_bytes",
    ),
    Mutant(
        "digests_unchecked", "kvbridge/files.py", 'if found != expected:\n            raise CorruptFile(f"{path / name}',
        'if False:\n            raise CorruptFile(f"{path / name}',
        "tests/hostile/test_assets.py::test_one_bit_flipped_anywhere",
    ),
    Mutant(
        "weights_of_any_manifest", "kvbridge/asset.py", 'if header.metadata != {"kvbridge": binding}:', "if False:",
        "tests/hostile/test_assets.py::test_weights_of_another_pair_or_another_fit",
    ),
    Mutant(
        "weights_not_finite", "kvbridge/asset.py", "if not bool(torch.isfinite(tensor).all())]", "if False]",
        "tests/hostile/test_weights.py::test_weights_that_are_not_finite",
    ),
    Mutant(
        "control_reads_the_sender_on_load", "kvbridge/manifest.py",
        "if any(g.blocks for entry in maps for g in entry.groups):", "if False:",
        "tests/hostile/test_controls.py::test_controls_that_read_the_sender_are_refused",
    ),
    Mutant(
        "snapshot_digest_unchecked", "kvbridge/snapshot_file.py",
        "if found.content_digest(tensors) != found.digest:", "if False:",
        "tests/hostile/test_snapshots.py::test_one_bit_flipped_anywhere",
    ),
    Mutant(
        "unmapped_layers_left_empty", "kvbridge/request.py", "depth = max(depth, own if own > shared else 0)", "pass",
        "tests/core/test_partial_translator.py::test_layers_without_a_map_are_the_receivers_own",
    ),
    Mutant(
        "published_before_it_is_whole", "kvbridge/files.py",
        'temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")\n    temporary.mkdir()',
        "temporary = path\n    temporary.mkdir()", "tests/hostile/test_killed.py::test_a_killed_save_leaves_nothing_or_everything",
    ),
)  # fmt: skip


def run_test(folder: Path, test: str) -> tuple[int, str]:
    """One pytest run over the copy in `folder`, in a forked process that has the heavy packages already; exit code, output."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            code = 70
            try:
                code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", test]))
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return code, output.read()


def try_mutant(mutant: Mutant, folder: Path) -> str:
    """`caught`, `MISSED`, or `ERROR` with what pytest said; the copy in `folder` is as before afterwards."""
    path = folder / mutant.file
    original = path.read_text("utf-8")
    if original.count(mutant.find) != 1:
        return f"ERROR: the text stands {original.count(mutant.find)} times in {mutant.file}"
    path.write_text(original.replace(mutant.find, mutant.replace), "utf-8")
    try:
        code, output = run_test(folder, mutant.test)
    finally:
        path.write_text(original, "utf-8")
    if code in (0, 1):
        return "MISSED" if code == 0 else "caught"
    return f"ERROR: pytest ended with {code}: {output[-300:]}"


def main(names: list[str]) -> int:
    """Tries the named mutants, or all; 0 when every one is caught."""
    unknown = set(names) - {m.name for m in MUTANTS}
    if unknown:
        print(f"no such mutants: {', '.join(sorted(unknown))}")
        return 2
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.dont_write_bytecode = True  # a cached module of one mutant must not serve the next
    for package in ("torch", "transformers.models.llama", "sklearn.linear_model", "hypothesis", "datasets"):
        importlib.import_module(package)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvbridge-mutants-") as place:
        folder = Path(place)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)
        for mutant in MUTANTS:
            if not names or mutant.name in names:
                start = time.perf_counter()
                result = try_mutant(mutant, folder)
                bad += result != "caught"
                print(f"{result:8} {mutant.name:40} {time.perf_counter() - start:5.1f} s  {mutant.test}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
