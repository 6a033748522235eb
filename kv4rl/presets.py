"""Named configurations, and the one command line made from the dataclasses of `config.py`."""

import argparse
import dataclasses
import difflib
import inspect
import re
import typing
from collections.abc import Sequence
from dataclasses import replace

from kv4rl.config import GRPOConfig, RolloutConfig, TrainConfig, require
from kv4rl.config_file import read_settings
from kv4rl.paper import EVALUATION_TASKS
from kv4rl.tasks.datasets import DAPO

# The sets of Table A2 that are evaluated during training too.
PERIODIC = tuple(name for name, (_, _, periodic, _) in EVALUATION_TASKS.items() if periodic)

# The paper's runs: every default of config.py is Table A1's value.
_QWEN3_4B = TrainConfig(
    model="Qwen/Qwen3-4B-Base",
    tasks=DAPO,  # from the hub; a local .jsonl or .parquet file of the same fields does as well
    output_dir="runs/qwen3_4b",
    updates=600,
    evaluate_every=50,
    evaluate_sets=PERIODIC,
    tensor_parallel=2,
    memory="phased",
    checkpoint_every=5,  # writing one of 4B takes a minute, longer than an iteration; the next save waits for it
    rollout=RolloutConfig(cache_pages=0),  # what the memory leaves in the precision's format (§A.2, §B.6)
)

# Our model on two CPU cores; the learning rate suits its 2.4M parameters.
_MINI = TrainConfig(
    model="mini-qwen3",
    tasks="mini",
    output_dir="runs/mini",
    updates=25,
    evaluate_prompts=64,
    evaluate_samples=4,
    evaluate_temperature=1.0,  # at Table A2's 0.6 the careless model makes no slips, and training shows nothing
    evaluate_top_p=1.0,
    checkpoint_every=5,
    rollout=RolloutConfig(
        groups_per_update=8,
        responses_per_group=8,
        age_limit=4,
        max_prompt_tokens=64,
        max_response_tokens=1024,
        max_active_requests=128,
        step_tokens=1024,
        workspace_tokens=8192,
        cache_pages=4096,
    ),
    grpo=GRPOConfig(learning_rate=1.5e-4, warmup_updates=2, microbatch_tokens=2048),
)

# A small model of natural language, and what GRPO can teach it; `--tasks FILE.jsonl` gives it problems of your own.
_SMOLLM2 = replace(
    _MINI,
    model="smollm2-135m",
    tasks="sums",
    reading="last_box",  # the sum repeated as an expression is worth the answer: any expression would do without it
    output_dir="runs/smollm2",
    updates=30,
    rollout=RolloutConfig(
        groups_per_update=16,
        age_limit=4,
        max_prompt_tokens=512,
        max_response_tokens=256,
        max_active_requests=256,
        workspace_tokens=16384,
        cache_pages=4096,  # half of what all slots could fill
    ),
    grpo=GRPOConfig(learning_rate=2e-5, warmup_updates=2, microbatch_tokens=8192),
)

PRESETS: dict[str, TrainConfig] = {
    "smoke": replace(
        _MINI,
        output_dir="runs/smoke",
        updates=2,
        evaluate_prompts=4,
        evaluate_samples=2,
        checkpoint_every=1,
        rollout=replace(_MINI.rollout, groups_per_update=2, responses_per_group=4, max_response_tokens=128),
    ),
    "mini": _MINI,
    "smollm2": _SMOLLM2,
    "qwen3_4b": _QWEN3_4B,
    "qwen3_8b": replace(
        _QWEN3_4B,
        model="Qwen/Qwen3-8B-Base",
        output_dir="runs/qwen3_8b",
        updates=400,
    ),
}


DEFAULT = "mini"
SHORT = {"kv.precision": ("--precision",)}  # what every command of a comparison gives
_STOPPING = """The same command resumes a run. `touch OUTPUT_DIR/stop` ends it after the iteration in progress, saved.
SIGTERM does so too, but torchrun kills its ranks 30 s after it (torch 2.13's has --shutdown-timeout): use the file."""


def preset(name: str) -> TrainConfig:
    """A preset by name; ValueError naming the known ones."""
    require(isinstance(name, str) and name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]


def parse_config(arguments: Sequence[str] | None = None, *, program: str = "kv4rl.train") -> TrainConfig:
    """The configuration a command line asks for: a preset, what `--config FILE` says, and flags (`--kv.precision kv8`).

    A wrong flag or value ends the program with status 2 and one sentence on what would be right.
    """
    parser = _Parser(
        prog=f"python -m {program}", description=_STOPPING,
        usage="%(prog)s [--preset NAME] [--config FILE] [--FIELD VALUE ...]   (--help lists the fields)",
        allow_abbrev=False, formatter_class=argparse.RawTextHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--preset", choices=tuple(PRESETS), help=f"values to begin with; default {DEFAULT}")
    parser.add_argument("--config", metavar="FILE", help="a .toml or .json file of fields, kv, rollout and grpo nested")
    flags = _flags(TrainConfig)
    for name, (kind, comment) in flags.items():
        kind, *more = typing.get_args(kind) or (kind,)
        width = {"nargs": "*" if more == [...] else 1 + len(more)} if more else {}
        parser.add_argument(
            f"--{name}", *SHORT.get(name, ()), dest=name, type=kind, default=argparse.SUPPRESS,
            metavar=name.rpartition(".")[2].upper(), help=comment.replace("%", "%%"), **width,
        )  # fmt: skip
    given = vars(parser.parse_args(arguments))
    named, file = given.pop("preset"), given.pop("config")
    try:
        values = read_settings(file) if file else {}
        in_file = values.pop("preset", DEFAULT)
        for name in values:
            near = difflib.get_close_matches(name, flags, n=1)
            require(name in flags, f"a name in {file}", name, f"{near[0]}?" if near else "a field that --help lists")
        return override(preset(named or in_file), values | given)
    except ValueError as error:
        parser.error(str(error))


def override(config, values: dict[str, object]):
    """`config` with fields replaced by dotted name, checked as a whole; ValueError as its dataclasses raise it."""
    own: dict[str, object] = {}
    nested: dict[str, dict] = {}
    for name, value in values.items():
        head, _, rest = name.partition(".")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = tuple(value) if isinstance(value, list) else value
    for head, inner in nested.items():
        own[head] = override(getattr(config, head), inner)
    return replace(config, **own)


class _Parser(argparse.ArgumentParser):
    """Names the nearest flag when one is not known."""

    def error(self, message: str) -> typing.NoReturn:
        unknown = re.search(r"unrecognized arguments: (--\S+)", message)
        if unknown:
            flags = [flag for action in self._actions for flag in action.option_strings]
            near = difflib.get_close_matches(unknown[1].split("=")[0], flags, n=1, cutoff=0.75)
            message += f" (did you mean {near[0]}?)" if near else " (--help lists them all)"
        super().error(message)


def _flags(cls: type, prefix: str = "") -> dict[str, tuple[type, str]]:
    """Flag name -> (type, the comment that stands behind the field in config.py)."""
    comments = dict(re.findall(r"^    (\w+): [^#\n]*?(?:  # (.*))?$", inspect.getsource(cls), re.MULTILINE))
    kinds = typing.get_type_hints(cls)
    flags: dict[str, tuple[type, str]] = {}
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            flags |= _flags(kind, f"{prefix}{field.name}.")
        else:
            flags[prefix + field.name] = (kind, comments.get(field.name, ""))
    return flags
