"""Output of each command equals ``golden/COMMAND.txt``: exit code, text, messages, and the form of its JSON.

``UPDATE_GOLDEN=1`` rewrites these files. Times, rates and paths are replaced, and long lines truncated.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ucp.cli.dispatch import COMMANDS, main
from tests.cli.samples import PATTERNS, find_parser, make_gpt, write_sample
from tests.support.damage import flip_largest
from tests.synth import Model, Param, Topology, random_state, write_checkpoint

GOLDEN = Path(__file__).with_name("golden")
OPTIM = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
WRONG = '[{"match":".*","pattern":"shard-h","dim":2}]'
SAVES = "--mtbf 4h --restart 2m --read-gbs 273 --write-gbs 273"
MADE = [
    "convert good made",
    "export good foreign --to dcp --workers 2",
    "export good exported",
    "export good exported-bf16 --dtype bf16",
]
REFUSED_EXPORTS = [
    *("--merge", "--layout torchtitan", "--to dcp --like . --max-shard-size 1GB", "--to dcp --adapter"),
    *("--adapter-name x", "--adapter", "--adapter --like .", "--like nowhere"),
    *("--rename abc", "--rename h.*=x", "--rename wte.*=", "--window-mb 1"),
]

LINES = {
    "list": [
        *("list good", "list missing", "list weights", "list trainer"),
        *("list dangling", "list empty", "list megatron"),
    ],
    "inspect": [
        "inspect good",
        "inspect good --param lm_head.weight",
        "inspect tensor",
        f"inspect tensor --patterns {PATTERNS}",
        "inspect made",
        "inspect foreign",
        *("inspect missing", "inspect weights"),
        "inspect good --param mlp",
        "inspect good --param nowhere",
        "inspect good --param (",
        "inspect empty",
        "inspect megatron",
        "inspect truncated",
        "inspect leftover/global_step3",
        "inspect unnamed --all",
        *("inspect unnamed --groups groups.json", "inspect unnamed --groups groups.json --param wte.weight"),
        *("inspect unnamed --groups wrong.json", "inspect unnamed --groups absent.json"),
        *("inspect unnamed --groups module", "inspect tensor --param wt.*weight --groups module"),
    ],
    "verify": [
        "verify good",
        "verify good --headers-only",
        "verify warned/global_step3",
        "verify legacy",
        "verify mixed",
        "verify damaged",
        "verify missing",
        "verify dangling",
        "verify nothing",
        "verify sealed --seal",
        "verify sealed --against sealed/global_step3/ucp_seal.json",
        "verify damaged --against sealed/global_step3/ucp_seal.json",
        "verify other --against sealed/global_step3/ucp_seal.json",
        "verify made --against made/ucp_manifest.json",
        *("verify sealed --seal --also good", "verify made --seal", "verify foreign --seal"),
        *("verify good --window-mb 0", "verify good --groups module", "verify unnamed"),
    ],
    "diff": [
        "diff good damaged",
        "diff good good",
        "diff good made",
        "diff good other",
        "diff good damaged --tolerance inf",
        "diff good damaged --only wte",
        "diff good damaged --states fp32",
        *("diff foreign good", "diff foreign good --only lm_head"),
        *("diff exported good", "diff good exported"),
        "diff exported-bf16 good",
        *("diff good weights", "diff good weights --only attention --all"),
        "diff good tensor",
        f"diff good tensor --patterns {PATTERNS}",
        f"diff good tensor --patterns {WRONG}",
        "diff good good --tolerance -1",
        "diff good good --workers -1",
        "diff good good --only (",
        "diff --config good good",
        "diff --config good other",
        *("diff good good --groups module", "diff good unnamed --groups groups.json"),
        *(
            "diff --config good good --groups module",
            "diff --config good other --only x",
            "diff --config foreign exported",
        ),
    ],
    "plan": [
        "plan good --target dp=3,zero=3 --read-gbs 2",
        "plan good --target dp=2,zero=1",
        "plan good --target dp=2,ep=2",
        "plan good --target dp=5,tp=3 --read-gbs 2",
        f"plan tensor --target dp=2,zero=1 --patterns {PATTERNS}",
        f"plan good --target dp=2,zero=2 --net-gbs 25 {SAVES}",
        "plan --params 1B --ranks 4",
        f"plan --params 985.7e9 --ranks 8192 --target tp=8,pp=64 --net-gbs 25 {SAVES}",
        "plan foreign --target dp=4,zero=3",
        "plan good",
        "plan --params 1B --ranks 4 --mtbf 8h",
        "plan --params 1B --ranks 4 --stall 8s",
        "plan --params 1B --patterns x --also y",
        "plan good --target dp=2 --params 1B",
        "plan --params 1B --target dp=4,pp=2,ep=2,zero=2",
        "plan good --target dp=2,zero=1 --groups module",
        *("plan good --target dp=2 --optimizer sgd", "plan absent --target dp=2"),
    ],
    "convert": [
        *("convert good out", "convert good out", "convert other out", "convert other out --overwrite --quiet"),
        'convert good renamed --patterns {"rename":{"ln_f.*":"x"}}',
        *("convert good out --groups module", "convert megatron no-out"),
        *("convert tensor no-out", f"convert tensor no-out --patterns {WRONG}"),
    ],
    "export": [
        "export good weights-out",
        "export good weights-out",
        "export good dcp-out --to dcp --dtype bf16",
        *("export weights weights-copied", "export exported-bf16 copied --dtype stored"),
        "export good grouped --groups module",
        "export foreign no-out --exclude-frozen-parameters",
        "export unnamed no-out --groups module",
        *(f"export good no-out {options}" for options in REFUSED_EXPORTS),
    ],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("golden")
    good = write_sample(root / "good", Topology(1, 2, "bf16"), make_gpt(2))
    for name in ("damaged", "missing", "weights", "warned", "dangling", "sealed"):
        shutil.copytree(good.parent, root / name)
    flip_largest(root / "damaged" / good.name / OPTIM)
    (root / "missing" / good.name / OPTIM).unlink()
    truncated = write_sample(root / "truncated", Topology(1, 3, "bf16"), make_gpt(1))
    (truncated / OPTIM).unlink()
    os.truncate(truncated / OPTIM.replace("rank_1", "rank_2"), 1000)
    write_sample(root / "unnamed", Topology(0, 2), make_gpt(2))
    groups = [[param.name for param in group] for group in make_gpt(2).groups]
    (root / "groups.json").write_text(json.dumps(groups))
    (root / "wrong.json").write_text("{}")
    for path in (root / "weights" / good.name).glob("*optim_states.pt"):
        path.unlink()
    for name in ("warned", "dangling"):
        (root / name / "latest").write_text("global_step99")
    write_sample(root / "other", Topology(3, 1, "bf16"), make_gpt(2), global_steps=4)
    write_sample(root / "tensor", Topology(1, 1, "bf16", tp=2), make_gpt(2))
    for step in (4, 8):
        write_sample(root / "trainer" / f"checkpoint-{step}", Topology(1, 2, "bf16"), make_gpt(1), global_steps=step)
    model = Model((Param("a", (30, 50)),))
    for name in ("legacy", "mixed"):
        write_checkpoint(root / name, model, random_state(model, 0), Topology(1, 2), legacy=True)
    leftover = write_checkpoint(root / "leftover", model, random_state(model, 0), Topology(1, 2), latest=False)
    states = leftover / "mp_rank_00_model_states.pt"
    shutil.copy(states, next((root / "mixed").glob(f"*/{states.name}")))
    shutil.copy(good / OPTIM, leftover / OPTIM.replace("rank_1", "rank_7"))
    for name in ("empty", "megatron", "nothing"):
        (root / name).mkdir()
    (root / "nothing" / "model.safetensors").write_bytes(bytes(30))
    for name in ("metadata.json", "common.pt", "__0_0.distcp"):
        (root / "megatron" / name).write_text("{}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("COLUMNS", "100")
        for line in MADE:
            assert main([*line.split(), "-q", "--json"]) == 0
        yield root


LONGEST = 180
VOLATILE = (
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d[+-]\d\d:\d\d)?", "DATE"),
    (r"\b\d+(\.\d+)? s\b(?= \(|\.|$)", "SECONDS"),
    (r"\([\d.]+ [KMG]?i?B/s( read)?\)", "(RATE)"),
    (r"(?<=DeepSpeed )\d+\.\d+\.\d+", "RELEASE"),
    (r"(?<=deepspeed_ucp )\d+\.\d+\S*(?=,)", "VERSION"),
    (r"\b[0-9a-f]{8}(?:[0-9a-f]{56})?\b", "CRC"),
)


def normalise(text: str, root: Path) -> str:
    text = text.replace(f"{root}/", "").replace(str(root), "ROOT")
    for pattern, word in VOLATILE:
        text = re.sub(pattern, word, text, flags=re.MULTILINE)
    return "\n".join(line if len(line) <= LONGEST else f"{line[:LONGEST]}…" for line in text.splitlines())


def list_forms(value: Any, path: str = "") -> Iterator[str]:
    """List path and type of every value; items of a list have one path."""
    if isinstance(value, dict | list) and value:
        parts = value.items() if isinstance(value, dict) else [("[]", each) for each in value]
        for key, each in parts:
            yield from list_forms(each, f"{path}.{key}")
    else:
        kind = type(value).__name__
        yield f"{path[1:]} {'number' if kind in ('int', 'float') else kind}"


def run(line: str, root: Path, forms: set[tuple[str, ...]], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line, its output and exit code, and the form of its JSON, unless its keys are among ``forms``.

    The help must list all keys of a result. A refused command must leave no files.
    """
    before = set(os.listdir(root))
    words = [PATTERNS if word == "PATTERNS" else word for word in line.replace(PATTERNS, "PATTERNS").split()]
    code = main(words)
    shown = capsys.readouterr()
    parts = [f"$ ds_ucp {line.replace(PATTERNS, 'PATTERNS')}", normalise(shown.out, root).rstrip()]
    parts += [f"stderr: {text}" for text in normalise(shown.err, root).splitlines()]
    parts.append(f"exit code {code}")
    again = ["--overwrite"] if words[0] in ("convert", "export") and not code else []
    assert main([*words, *again, "--json"]) == code
    assert code != 2 or set(os.listdir(root)) == before
    data = json.loads(capsys.readouterr().out)
    if tuple(data) not in forms:
        forms.add(tuple(data))
        found = ", ".join(dict.fromkeys(list_forms(data)))
        parts += textwrap.wrap(f"JSON: {found}", 118, break_long_words=False, break_on_hyphens=False)
        keys = find_parser(words[0]).format_help().partition("\nkeys of the JSON object:\n")[2]
        assert "error" in data or set(data) <= set(re.findall(r"\w+", keys))
    return "\n".join(filter(None, parts))


@pytest.mark.parametrize("command", LINES)
def test_the_output_of_a_command_is_recorded(command: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    forms = {("error", "kind")}
    found = "\n\n".join(run(line, root, forms, capsys) for line in LINES[command]) + "\n"
    path = GOLDEN / f"{command}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_every_command_has_recorded_output() -> None:
    assert {*LINES, "run"} == set(COMMANDS)
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(LINES)


@pytest.mark.parametrize("command", LINES)
def test_the_first_line_agrees_with_the_exit_code(command: str) -> None:
    """Only a good verdict has exit code 0. No sizes follow an obstacle."""
    verdicts = (
        r"\d+ checkpoints?, all complete",
        ".*: complete",
        ".*: opens",
        "equal",
        "possible",
        r".*: \d+ tensors(?! differ)",
    )
    good = "|".join((*verdicts, ".*: already", "wte.weight"))
    for block in (GOLDEN / f"{command}.txt").read_text(encoding="utf-8").split("\n\n$ ds_ucp "):
        lines = block.splitlines()
        (code,) = (int(line.split()[-1]) for line in lines if line.startswith("exit code "))
        assert (re.match(good, lines[1]) is not None) == (code == 0), lines[:2]
        if lines[1] == "not possible":
            assert not any("iB" in line for line in lines[: lines.index("exit code 1")])
