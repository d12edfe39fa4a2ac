"""The command line. It parses without importing torch and then calls the same functions as Python users do."""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from dosimeter.terminal.failures import EXIT_CODES, carry_out, say
from dosimeter.terminal.logs import log_to_stderr
from dosimeter.version import __version__

ASSIGNMENT = re.compile(r"[A-Za-z_][\w.]*=")
EPILOG: dict[str, Any] = {"epilog": EXIT_CODES, "formatter_class": argparse.RawDescriptionHelpFormatter}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `terminal.failures` lists the codes."""
    options = _parse(arguments)
    log_to_stderr()
    return carry_out(lambda: _run_command(options), debug=options.debug, resumes=bool(getattr(options, "out", None)))


def _run_command(options: argparse.Namespace) -> int:
    """The command, with leave to import the modules that the command line names. A module that only a file names stays shut."""
    if not hasattr(options, "allow_code"):
        return options.command(options)
    from dosimeter.models.named_code import allow_code

    with allow_code({*options.allow_code, *_modules_named(_with_model(options))}, announce=functools.cache(say)):
        return options.command(options)


def _modules_named(words: Sequence[str]) -> list[str]:
    """The modules of models that the words name themselves, as `model=module:function`, or as the model that `inspect` takes."""
    from dosimeter.config import override
    from dosimeter.models.named_code import module_of

    assignments = [word for word in words if ASSIGNMENT.match(word)]
    model = override({}, [word for word in assignments if word.startswith(("model=", "model."))]).get("model")
    names = [model.get("name") if isinstance(model, dict) else model, *(word for word in words if word not in assignments)]
    return [module for name in names if (module := module_of(name))]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; key=value words may stand before, between and after them."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "words") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.words = [*options.words, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dosimeter",
        description="Measure what a shared gradient gives away.",
        **EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"dosimeter {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    audit = _add(commands, "audit", _audit, "run every attack that fits and write a report (the main job)")
    audit.add_argument("words", nargs="*", metavar="CONFIG.toml | key=value", help="an audit file, and options that override it")
    audit.add_argument("--out", default="dosimeter-audit", metavar="DIR", help="where records and report go (default: %(default)s)")
    audit.add_argument("--defenses", metavar="all | NAME,...", help="behind these defenses, mild and strong, and what each one costs")
    audit.add_argument(
        "--fail-on",
        action="append",
        default=[],
        metavar="CONDITION",
        help="exit 1 on 'leaked', 'labels.verdict == leaked' or 'inputs.psnr.median > 20', say",
    )

    audit.add_argument("--model", metavar="NAME", help="the model, as model=NAME says it")
    audit.add_argument(
        "--capture", metavar="FILE", help="audit what a client of a federation sent, from its capture; or a folder of captures"
    )
    audit.add_argument("--before", metavar="FILE", help="the weights that the server sent")
    audit.add_argument("--after", metavar="FILE", help="audit what a client of a federation sent: its weights after training")
    audit.add_argument("--truth", metavar="DATA", help="the private images behind a received update, to score what is recovered")
    audit.add_argument("--format", default="text", choices=("text", "json", "junit", "sarif", "markdown"), help="what is printed")

    run = _add(commands, "run", _run, "run one experiment")
    run.add_argument("words", nargs="+", metavar="CONFIG.toml | key=value", help="an experiment file, and options that override it")
    run.add_argument("--out", metavar="DIR", help="append the record to DIR/records.jsonl")
    audit.add_argument("--max-seconds", type=float, metavar="SECONDS", help="share so much time among the attacks, and say what was cut")
    for long in (audit, run):
        long.add_argument("--checkpoint-every", type=float, metavar="SECONDS", help="how often a long attack saves itself in DIR")

    sweep = _add(commands, "sweep", _sweep, "run every combination of models, data, batch sizes, defenses, methods and seeds")
    sweep.add_argument("words", nargs="+", metavar="SWEEP.toml | key=value", help="a sweep file, and options that override it")
    sweep.add_argument("--out", default="dosimeter-sweep", metavar="DIR", help="where records and report go (default: %(default)s)")
    sweep.add_argument("--workers", type=int, default=1, metavar="N", help="how many experiments run at a time (default: %(default)s)")
    sweep.add_argument("--on", default="processes", choices=("processes", "ray"), help="who works (default: %(default)s)")
    sweep.add_argument("--address", metavar="ADDRESS", help="of the Ray cluster (default: a local one)")
    sweep.add_argument("--gpus", type=float, default=0.0, metavar="SHARE", help="GPUs of one worker on Ray, such as 0.25")

    listing = _add(commands, "list", _list, "list every method with its idea, what it needs and its options")
    listing.add_argument("kind", nargs="?", metavar="KIND", help="only this kind: labels, features, maps, attacks, defenses, ...")

    again = _add(commands, "reproduce", _reproduce, "carry out a paper's tables again and set them beside the published numbers")
    again.add_argument("table", nargs="?", metavar="PAPER[/TABLE]", help="a paper, a table, or a TOML file; without one, all are listed")
    again.add_argument("--status", action="store_true", help="run nothing; say for every item of each paper how far it is reproduced")
    again.add_argument("--seed", type=int, metavar="N", help="of the first batch (default: the table's own, 0)")
    again.add_argument("--quick", action="store_true", help="fewer batches and smaller models: minutes on two cores")
    again.add_argument("--data", metavar="DIR", help="where the data sets and weights lie (default: $DOSIMETER_DATA)")
    again.add_argument("--cache", metavar="DIR", help="where models trained for a table are kept (default: the user's cache)")
    again.add_argument("--out", default="dosimeter-reproduction", metavar="DIR", help="where records go (default: %(default)s)")
    again.add_argument("--device", default="auto", help="cpu or cuda (default: cuda where there is one)")

    inspect = _add(commands, "inspect", _inspect, "tell whether a model from a server is rigged: exit code 0 no sign seen, 1 suspicious")
    inspect.add_argument(
        "words", nargs="+", metavar="MODEL | key=value", help="a TOML file with a [model] table, an architecture or module:function"
    )
    inspect.add_argument("--reference", metavar="FILE", help="the weights of the round before")
    inspect.add_argument("--data", metavar="FOLDER", help="the client's own images")

    generator = _add(commands, "generator", _generator, "train the decoder that fgla, rgla and generative_prior draw with")
    generator.add_argument("action", choices=("train",), help="train: on the auxiliary images, through the frozen model")
    generator.add_argument("words", nargs="*", metavar="CONFIG.toml | key=value", help="an audit file, and options that override it")
    generator.add_argument("--out", metavar="FILE", help="where the decoder goes (default: the user's cache, where the attacks look)")
    generator.add_argument("--max-seconds", type=float, metavar="SECONDS", help="end the training then, as decoder.seconds=SECONDS does")

    capture = _add(commands, "capture", _capture, "show what a client of a federation sent, from its capture")
    capture.add_argument("action", choices=("show",), help="show: the facts of the capture and its tensors")
    capture.add_argument("path", metavar="FILE | DIR", help="a capture, or a folder of captures")

    privacy = _add(commands, "privacy", _privacy, "set the ε that was typed beside the ε that holds, and the ε that a trial shows")
    privacy.add_argument("name", metavar="NAME", help="a privacy setting of a framework: see `dosimeter list privacy`")
    privacy.add_argument("words", nargs="*", metavar="key=value", help="its options")
    privacy.add_argument("--rounds", type=int, default=1, metavar="N", help="in which the client takes part (default: %(default)s)")
    privacy.add_argument("--delta", type=float, metavar="δ", help="at which ε is counted (default: the setting's own, or 1e-5)")
    privacy.add_argument("--trials", type=int, metavar="N", help="draws of what leaves, for each of two neighbours (default: 20000)")

    for named in (audit, run, sweep, again, inspect, generator):
        named.add_argument(
            "--allow-code", action="append", default=[], metavar="MODULE", help="let the file's model, MODULE:FUNCTION, run its code"
        )

    report = _add(commands, "report", _report, "rebuild the report from records alone")
    report.add_argument("folder", metavar="DIR")
    report.add_argument("--format", default="text", choices=("text", "markdown"), help="print the path, or a summary in Markdown")
    report.add_argument("--pdf", action="store_true", help="also print its first page to report.pdf, with Chromium or Chrome")

    ask = _add(commands, "ask", _ask, "answer a question in SQL over the records of an audit or a sweep, with DuckDB")
    ask.add_argument("folder", metavar="DIR")
    ask.add_argument(
        "question", metavar="SQL", help="over the tables `records` and `samples`, such as 'SELECT method, verdict FROM records'"
    )
    return parser


def _add(commands: Any, name: str, command: Any, help_text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".", **EPILOG)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure (or set DOSIMETER_DEBUG)")
    parser.set_defaults(command=command)
    return parser


def _audit(options: argparse.Namespace) -> int:
    from dosimeter.bars import progress_bar, step_bar
    from dosimeter.config import construct
    from dosimeter.progress import listening
    from dosimeter.report.page import check_report_place
    from dosimeter.runs.audit import AuditConfig, run_suite
    from dosimeter.runs.audited_client import prepare
    from dosimeter.runs.defense_grid import DefenseGrid, grid_of, run_grid
    from dosimeter.runs.gate import caveat, parse_condition
    from dosimeter.terminal.audit import print_audit
    from dosimeter.terminal.formats import FORMATS, check

    _spare_cores()
    conditions = [parse_condition(text) for text in options.fail_on]
    data = _read_words(_with_model(options))
    received = {name: getattr(options, name) for name in ("capture", "before", "after", "truth")}
    if options.defenses is not None:
        if any(received.values()):
            raise ValueError("--defenses: expected no received update beside it; its client has sent what it sent")
        data |= {"grid": grid_of(options.defenses)}
    check_report_place(options.out)
    settings: dict[str, Any] = {"out": options.out, "checkpoint_every": options.checkpoint_every, "max_seconds": options.max_seconds}
    if any(received.values()):
        from dosimeter.runs.received_files import audit_received

        with progress_bar() as progress:
            settings |= {"progress": progress}
            result = audit_received(data, **received, **settings)
    else:
        config = construct(DefenseGrid if "grid" in data else AuditConfig, data)
        with step_bar() as listener, listening(listener):
            client = prepare(config.model, config.data, seed=config.seed, device=config.device)
        with progress_bar() as progress:
            settings |= {"progress": progress}
            result = run_grid(client, config, **settings) if isinstance(config, DefenseGrid) else run_suite(client, config, **settings)
    path = result.save(options.out)
    checks = check(conditions, result.records)
    failures = [one.failure for one in checks if one.failure]
    untested = {one.condition: one.untested for one in checks if one.untested}
    if options.format in FORMATS:
        source = next((word for word in options.words if not ASSIGNMENT.match(word)), str(path))
        sys.stdout.write(FORMATS[options.format](result, checks, path, source))
    elif options.json or options.format == "json":
        verdicts = [vars(verdict) for verdict in result.verdicts]
        records = [_without_evidence(record) for record in result.records]
        _print_json({"verdicts": verdicts, "records": records, "report": str(path), "failures": failures, "untested": untested})
    else:
        print_audit(result, path)
    if result.resumed and not conditions:
        say(f"resumed: {result.resumed} of {len(result.records)} records were in {options.out} already")
    for sentence in (*result.cuts, *failures, *filter(None, (caveat(condition, result.records) for condition in conditions))):
        say(sentence)
    if failures:
        return 1
    if conditions and result.resumed:
        say(f"--fail-on trusts {result.resumed} of {len(result.records)} records as {options.out} holds them; remove it to measure anew")
    for condition, why in untested.items():
        raise ValueError(f"--fail-on: {why}, so '{condition}' cannot tell a pass from a failure")
    return 0


def _run(options: argparse.Namespace) -> int:
    from pathlib import Path

    from dosimeter.artefacts import CHECKPOINT_FOLDER, save_checkpoints
    from dosimeter.bars import step_bar
    from dosimeter.config import construct
    from dosimeter.progress import listening
    from dosimeter.records import lock_folder, write_record
    from dosimeter.runs.audited_client import Experiment, prepare
    from dosimeter.runs.experiment import run
    from dosimeter.terminal.record import print_record
    from dosimeter.types import Outcome

    _spare_cores()
    config = construct(Experiment, _read_words(options.words))
    with step_bar() as listener, listening(listener):
        client = prepare(config.model, config.data, seed=config.seed, device=config.device)
    folder = Path(options.out) / CHECKPOINT_FOLDER if options.out else None
    with lock_folder(options.out, shared=True):
        with step_bar() as listener, listening(listener), save_checkpoints(folder, options.checkpoint_every):
            record = run(client, config.measurement(), raise_refusals=True)
        if options.out:
            write_record(options.out, record)
    if options.json:
        _print_json(_without_evidence(record))
    else:
        print_record(record)
    return 3 if record.outcome == Outcome.CRASHED else 0


def _sweep(options: argparse.Namespace) -> int:
    from dosimeter.terminal.sweep import sweep_and_report

    found = sweep_and_report(_read_words(options.words), options)
    if options.json:
        _print_json(found)
    else:
        sys.stdout.write("{done} of {experiments} experiments done, {crashed} crashed\nreport: {report}\n".format(**found))
    if found["refused"]:
        say("{refused} of {experiments} experiments have no model or data ({why}); the same command tries them again".format(**found))
    return 0 if found["done"] == found["experiments"] else 3


def _list(options: argparse.Namespace) -> int:
    from dosimeter.listing import catalogue
    from dosimeter.terminal.catalogue import print_catalogue

    entries = catalogue(options.kind)
    if options.json:
        _print_json(entries)
    else:
        print_catalogue(entries)
    return 0


def _reproduce(options: argparse.Namespace) -> int:
    from dosimeter.terminal.reproducing import run_reproduce

    return run_reproduce(options, _print_json)


def _inspect(options: argparse.Namespace) -> int:
    from dosimeter.inspection.command import run_inspect

    return run_inspect(options.words, reference=options.reference, data=options.data, as_json=options.json)


def _generator(options: argparse.Namespace) -> int:
    from dosimeter.bars import step_bar
    from dosimeter.progress import listening
    from dosimeter.runs.decoder_training import train_from

    _spare_cores()
    with step_bar() as listener, listening(listener):
        limit = [] if options.max_seconds is None else [f"decoder.seconds={options.max_seconds}"]
        found = train_from(_read_words([*options.words, *limit]), options.out)
    if options.json:
        _print_json(found)
    else:
        sys.stdout.write(f"{found['origin']} in {found['seconds']} s: {found['path']}\n")
    return 0


def _capture(options: argparse.Namespace) -> int:
    from dosimeter.terminal.capture import print_captures, read_captures

    found = read_captures(options.path)
    if options.json:
        _print_json(found)
    else:
        print_captures(found)
    return 0


def _privacy(options: argparse.Namespace) -> int:
    from dosimeter.terminal.privacy import print_guarantee, read_guarantee

    found = read_guarantee(options.name, options.words, rounds=options.rounds, delta=options.delta, trials=options.trials)
    if options.json:
        _print_json({"readings": found.as_table(), "caveats": list(found.caveats)})
    else:
        print_guarantee(found)
    return 0


def _report(options: argparse.Namespace) -> int:
    from dosimeter.report import print_report, write_report

    paths = {"report": write_report(options.folder)}
    if options.pdf:
        paths["pdf"] = print_report(paths["report"])
    if options.format == "markdown":
        from dosimeter.runs.audit import read
        from dosimeter.terminal.formats import markdown

        sys.stdout.write(markdown(read(options.folder), [], paths["report"], options.folder))
    elif options.json:
        _print_json({name: str(path) for name, path in paths.items()})
    else:
        sys.stdout.write("".join(f"{path}\n" for path in paths.values()))
    return 0


def _ask(options: argparse.Namespace) -> int:
    from dosimeter.runs.audit import read
    from dosimeter.terminal.questions import answer, print_answer

    columns, rows = answer(read(options.folder).records, options.question)
    if options.json:
        _print_json([dict(zip(columns, row)) for row in rows])
    else:
        print_answer(columns, rows)
    return 0


def _spare_cores() -> None:
    """Use half of the cores. Small networks gain nothing from more, and stall where another process holds a core."""
    import os

    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))


def _with_model(options: argparse.Namespace) -> list[str]:
    """The words, and before them what `--model` names: an architecture, module:function, or a TOML file with a [model] table."""
    model = getattr(options, "model", None)
    named = [] if not model else [model] if model.endswith(".toml") else [f"model={model}"]
    return [*named, *getattr(options, "words", ())]


def _read_words(words: Sequence[str]) -> dict[str, Any]:
    """The configuration as plain data, from at most one TOML file and any number of key=value words."""
    from pathlib import Path

    from dosimeter.config import override, read_toml, resolve_paths

    files = [word for word in words if not ASSIGNMENT.match(word)]
    if len(files) > 1:
        raise ValueError(f"expected one file and key=value words, got the files {', '.join(files)}")
    data = resolve_paths(read_toml(files[0]), Path(files[0]).parent) if files else {}
    return override(data, [word for word in words if ASSIGNMENT.match(word)])


def _without_evidence(record: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name != "evidence"}


def _print_json(value: Any) -> None:
    from dosimeter.records import finite_only

    json.dump(finite_only(value), sys.stdout, ensure_ascii=False, indent=2, default=str)  # DuckDB answers with dates, bytes and more
    sys.stdout.write("\n")


if __name__ == "__main__":
    sys.exit(main())
