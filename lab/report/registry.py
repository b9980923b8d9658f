# SPDX-License-Identifier: GPL-2.0
"""The metrics that benches measure, as lab/report/metrics.toml defines them."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("metrics.toml")
Parameters = Mapping[str, str]


@dataclass(frozen=True)
class Rule:
    """Something that applies to a metric with these parameters.

    ``more``: the other keys of its table.
    """

    when: Parameters
    more: dict[str, Any]

    def applies(self, parameters: Parameters) -> bool:
        return all(parameters.get(name) == value for name, value in self.when.items())


@dataclass(frozen=True)
class Definition:
    """A table of metrics.toml; see the keys there."""

    name: str
    unit: str
    title: str
    label: str = ""
    more: str = ""
    better: str = "less"
    floor: float | None = None
    targets: tuple[Rule, ...] = ()
    main: Rule | None = None
    words: Mapping[str, Parameters] = field(default_factory=dict, repr=False)

    def text(self, template: str, parameters: Parameters) -> str:
        """A title, label or remark with the words of the parameters."""
        known = {
            name: self.words.get(name, {}).get(value, value).format_map(parameters)
            for name, value in parameters.items()
        }
        return template.format_map(known)

    def described(self, parameters: Parameters) -> dict[str, Any]:
        """The words of a metric with these parameters, by the names of its fields.

        KeyError when a parameter that a word needs is missing.
        """
        return {
            "title": self.text(self.title, parameters),
            "label": self.text(self.label, parameters),
            "more": self.text(self.more, parameters),
            "better": self.better,
        }


def _rules(given: Any) -> tuple[Rule, ...]:
    """The rules of a key: of a table, or of a list of tables."""
    tables = given if isinstance(given, list) else [given] if given else []
    return tuple(
        Rule(table.get("when", {}), {key: value for key, value in table.items() if key != "when"})
        for table in tables
    )


@functools.cache
def definitions() -> dict[str, Definition]:
    """All metrics by name."""
    data = tomllib.loads(FILE.read_text(encoding="utf-8"))
    found = {}
    for name, table in data["metrics"].items():
        main, targets = table.pop("main", None), table.pop("target", None)
        found[name] = Definition(
            name,
            **table,
            targets=_rules(targets),
            main=Rule({} if main is True else main, {}) if main else None,
            words=data["words"],
        )
    return found


def first(rules: tuple[Rule, ...], parameters: Parameters) -> Rule | None:
    """The first rule that applies."""
    return next((rule for rule in rules if rule.applies(parameters)), None)


def name(kind: str, parameters: Parameters) -> str:
    """The name of a metric of that kind, which metrics.toml need not have any more; "" when the
    parameters do not make it.
    """
    try:
        return kind.format_map(parameters)
    except KeyError:
        return ""


def words(kind: str, parameters: Parameters) -> dict[str, Any]:
    """The words of a metric, by the names of its fields; none if its definition has changed."""
    about = definitions().get(kind)
    try:
        return about.described(parameters) if about else {}
    except KeyError:
        return {}
