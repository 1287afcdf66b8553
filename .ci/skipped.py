"""Fails if a test was skipped in every one of the given JUnit reports: such a test tests nothing."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


def skipped_and_all(path: str) -> tuple[set[str], set[str]]:
    skipped, every = set(), set()
    for case in ET.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        every.add(name)
        if case.find("skipped") is not None:
            skipped.add(name)
    return skipped, every


def main(paths: list[str]) -> int:
    reports = [skipped_and_all(path) for path in paths]
    ran_somewhere = set().union(*(every - skipped for skipped, every in reports))
    never = sorted(set().union(*(skipped for skipped, _ in reports)) - ran_somewhere)
    for name in never:
        print(f"skipped in every job: {name}")
    return 1 if never or not reports else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
