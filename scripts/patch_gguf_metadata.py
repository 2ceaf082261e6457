#!/usr/bin/env python3
"""List, set, remove and copy the metadata of a GGUF file. Files are never changed in place.

python scripts/patch_gguf_metadata.py list model.gguf --prefix tq_ggml.
python scripts/patch_gguf_metadata.py set model.gguf -o named.gguf general.name="My model"
python scripts/patch_gguf_metadata.py remove model.gguf -o plain.gguf 'tq_ggml.*'
python scripts/patch_gguf_metadata.py copy constants.gguf model.gguf -o ready.gguf
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGUFValueType

from tq_ggml import metadata, streams
from tq_ggml.errors import TqError
from tq_ggml.gguf_check import SCALARS, open_gguf

SHOWN_ITEMS, SHOWN_TEXT = 6, 60
TYPES = [kind.name.lower() for kind in GGUFValueType if kind in SCALARS or kind == GGUFValueType.STRING]

# Words for people; llama.cpp does not go by them.
DESCRIPTIVE = (
    *("author", "base_model.", "basename", "dataset.", "description", "doi", "finetune", "languages", "license"),
    *("name", "organization", "quantized_by", "repo_url", "size_label", "source.", "tags", "url", "uuid", "version"),
)
HARMLESS = (metadata.PREFIX, *(f"general.{word}" for word in DESCRIPTIVE))


def read(path: Path, prefix: str = "") -> dict[str, bytes]:
    with open_gguf(path) as (data, header):
        return metadata.encoded(data, header, prefix)


# ---- values as text ------------------------------------------------------------------------------------------------


def shown(value: bytes) -> str:
    _, n = metadata.value_type(value)
    decoded = metadata.decode(value, SHOWN_ITEMS)
    if n is None:
        return shown_item(decoded)
    return f"[{', '.join(map(shown_item, decoded))}{', ...' if n > SHOWN_ITEMS else ''}]"


def shown_item(item: Any) -> str:
    if isinstance(item, str):
        return repr(item[:SHOWN_TEXT]) + ("..." if len(item) > SHOWN_TEXT else "")
    return f"{item:.7g}" if isinstance(item, float) else str(item)


def printable(key: str) -> str:
    return repr(key)[1:-1]


def parse(key: str, text: str, kind: GGUFValueType | None) -> bytes:
    """A value from the command line; without a type it is what it looks like."""
    if kind is None and not key.startswith("general."):  # general.version=1.0 is text, like all words for people
        value = guess(text)
    elif kind in (None, GGUFValueType.STRING):
        value = text
    else:
        value = parse_as(key, text, kind)
    return metadata.encode(value, kind)


def guess(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d{1,20}", text, re.ASCII):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.ASCII | re.IGNORECASE):
        return float(text)
    return text


def parse_as(key: str, text: str, kind: GGUFValueType) -> int | float | bool:
    try:
        if kind == GGUFValueType.BOOL:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return float(text) if kind in (GGUFValueType.FLOAT32, GGUFValueType.FLOAT64) else int(text)
    except (ValueError, KeyError):
        raise TqError(f"{printable(key)} is of type {kind.name.lower()}, and {text!r} is none") from None


# ---- commands ------------------------------------------------------------------------------------------------------


def list_keys(args: argparse.Namespace) -> None:
    found = read(args.file, args.prefix)
    for i, (key, value) in enumerate(found.items(), 1):
        kind, n = metadata.value_type(value)
        name = kind.name if n is None else f"[{kind.name}]"
        print(f"{i:7}: {name:10} | {1 if n is None else n:8} | {printable(key)} = {shown(value)}")


def set_keys(args: argparse.Namespace) -> None:
    before, changes = read(args.file), {}
    for assignment in args.assignments:
        key, equals, text = assignment.partition("=")
        if not key or not equals:
            raise TqError(f"{assignment!r} is not KEY=VALUE")
        changes[key] = parse(key, text, type_in(before, key) if args.type is None else args.type)
    write(args, before, changes)


def type_in(before: dict[str, bytes], key: str) -> GGUFValueType | None:
    kind, n = metadata.value_type(before[key]) if key in before else (None, None)
    if n is not None:
        raise TqError(f"{printable(key)} is an array, and set gives single values; add --type to replace it by one")
    return kind


def remove_keys(args: argparse.Namespace) -> None:
    before = read(args.file)
    removals = [key for pattern in args.keys for key in matching(before, pattern, args.file)]
    write(args, before, {}, dict.fromkeys(removals))


def matching(keys: Iterable[str], pattern: str, path: Path) -> list[str]:
    if pattern.endswith("*"):
        found = [key for key in keys if key.startswith(pattern[:-1])]
    else:
        found = [key for key in keys if key == pattern]
    if not found:
        raise TqError(f"{path} has no key {printable(pattern)}")
    return found


def copy_keys(args: argparse.Namespace) -> None:
    changes = read(args.origin, args.prefix)
    if not changes:
        raise TqError(f"{args.origin} has no key {printable(args.prefix)}*")
    write(args, read(args.file), changes)


def write(
    args: argparse.Namespace, before: dict[str, bytes], changes: dict[str, bytes], removals: Iterable[str] = ()
) -> None:
    risky = [key for key in (*changes, *removals) if not key.startswith(HARMLESS)]
    if risky and not args.force:
        raise TqError(f"a model may not load or work without its {printable(risky[0])}; add --force to change it")
    metadata.write_patched_copy(args.file, args.output, changes, removals, force=args.force, dry_run=args.dry_run)
    for key in removals:
        print(f"remove {printable(key)}")
    for key, value in changes.items():
        old = f"{shown(before[key])} -> " if key in before else ""
        print(f"{'change' if old else 'add   '} {printable(key)} = {old}{shown(value)}")
    print(f"{args.output} was not written (--dry-run)" if args.dry_run else args.output)


# ---- arguments -----------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise TqError(f"{message} (`{self.prog} --help` lists the options)")


def parse_type(text: str) -> GGUFValueType:
    if text.lower() in TYPES:
        return GGUFValueType[text.upper()]
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TYPES)}")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    listing = add("list", list_keys, "Print keys, with their types, lengths and values.")
    listing.add_argument("file", type=Path, metavar="FILE")
    listing.add_argument("--prefix", default="", metavar="P", help="only keys that start with it")

    setting = add("set", set_keys, "Copy FILE with single values added or changed.")
    add_writing(setting)
    setting.add_argument("assignments", nargs="+", metavar="KEY=VALUE")
    setting.add_argument(
        "--type", type=parse_type, metavar="T", help=f"{', '.join(TYPES)} (default: the key's own, or by VALUE's look)"
    )

    removing = add("remove", remove_keys, "Copy FILE without some keys.")
    add_writing(removing)
    removing.add_argument("keys", nargs="+", metavar="KEY", help="a * at its end stands for anything")

    copying = add("copy", copy_keys, "Copy FILE with keys added or changed to what FROM has.")
    copying.add_argument("origin", type=Path, metavar="FROM", help="a side file, or any GGUF")
    add_writing(copying)
    copying.add_argument("--prefix", default=metadata.PREFIX, metavar="P", help="of the keys (default: %(default)s)")
    return parser


def add_writing(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", type=Path, metavar="FILE")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the file to make")
    command.add_argument("--dry-run", action="store_true", help="check and tell everything, but write nothing")
    command.add_argument(
        "--force", action="store_true", help="replace OUT if it exists, and change keys that llama.cpp goes by"
    )


def main(argv: list[str] | None = None) -> int:
    streams.prepare()
    try:
        with streams.unwind_on_termination():
            args = build_parser().parse_args(argv)
            args.run(args)
            sys.stdout.flush()
    except TqError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        streams.discard_output()
        return 141
    except OSError as problem:
        streams.discard_output()
        print(f"error: cannot write the output: {problem.strerror or problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
