"""Known facts about a model, and the expressions by which rules refer to them.

Expressions are integer arithmetic: ``hidden``, ``args.num_attention_heads * head``, ``[0, 1, 3][n]``,
``args.kv_channels or hidden // heads``, ``own(0) == 2 * sibling('mlp.dense_4h_to_h.weight', 1)``, ``has('swiglu')``.
They are evaluated by a walk over the syntax tree, which refuses everything else.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from ..errors import ConfigError, MismatchError, advise
from .layout import Shape

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def compile_regex(expression: str, option: str = "patterns") -> re.Pattern[str]:
    """Compile a regular expression of an option; ConfigError if it is invalid."""
    try:
        return re.compile(expression)
    except re.error as error:
        raise ConfigError(f"{option}: {expression!r} is not a regular expression: {error}") from None


class UnknownError(LookupError):
    """An expression needs unknown facts; the arguments name or describe them."""

    @property
    def advice(self) -> str:
        """How a user can supply the facts."""
        if not all(name.isidentifier() for name in self.args):
            return "write numbers"
        variables = ", ".join(f'"{name}": <number>' for name in self.args)
        return f'set "patterns": {{"variables": {{{variables}}}, …}}'


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts for expressions.

    Attributes:
        args: saved arguments of the training script (``args.hidden_size``).
        hints: other plain values of the checkpoint (``checkpoint_version``).
        shapes: local shapes of all parameters on tensor-parallel rank 0, of either side.
        variables: name → expressions; all with known facts must agree.
        values: names with a numeric value (``total``, ``rest``).
        name, stem: the current parameter, and the part of its name that the prefix matched.
        measured: cached results of ``shape(…)``, which searches all parameters.
    """

    args: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    variables: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)
    name: str = ""
    stem: str = ""
    measured: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, hints: Mapping[str, Any] | None, shapes: Mapping[str, Sequence[Shape]]) -> Facts:
        """Collect a checkpoint's facts from its hints and its local shapes by rank."""
        args = (hints or {}).get("args")
        first = {name: ranks[0] for name, ranks in shapes.items()}
        return cls(args=args if isinstance(args, Mapping) else {}, hints=hints or {}, shapes=first)

    def evaluate(self, expression: str | int) -> Any:
        """Evaluate an expression.

        Raises:
            UnknownError: a fact is unknown.
            ConfigError: the expression is invalid.
            MismatchError: facts contradict each other.
        """
        if isinstance(expression, (int, float)):
            return expression
        return self._walk(_parse(expression), expression)

    def is_true(self, condition: str | int) -> bool:
        """Evaluate a condition; False if a fact is unknown."""
        try:
            return bool(self.evaluate(condition))
        except UnknownError:
            return False

    def _walk(self, node: ast.expr, text: str) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str() as value):
                return value
            case ast.Name(id=name):
                return self._find_name(name)
            case ast.Attribute(value=ast.Name(id="args"), attr=key):
                return self._find_argument(key)
            case (
                ast.BinOp(left=left, op=operation, right=right)
                | ast.Compare(left=left, ops=[operation], comparators=[right])
            ) if type(operation) in _ARITHMETIC:
                return self._calculate(type(operation), self._walk(left, text), self._walk(right, text), text)
            case ast.BoolOp():
                return self._choose(node, text)
            case ast.Subscript(value=ast.List(elts=items)):
                number = self._walk(node.slice, text)
                if type(number) is not int or not 0 <= number < len(items):
                    raise MismatchError(f"{text!r} has {len(items)} items and no item {number!r}; the first is item 0")
                return self._walk(items[number], text)
            case ast.Call(func=ast.Name(id=function), keywords=[]):
                return self._call(function, [self._walk(part, text) for part in node.args], text)
        raise ConfigError(f"patterns: {ast.unparse(node)!r} in {text!r} is not supported")

    def _calculate(self, kind: type[ast.AST], first: Any, second: Any, text: str) -> Any:
        try:
            if issubclass(kind, ast.operator) and any(isinstance(value, str) for value in (first, second)):
                raise TypeError("text is no number")  # Python repeats, joins and formats it
            return _ARITHMETIC[kind](first, second)
        except (TypeError, ZeroDivisionError) as error:
            raise MismatchError(f"{text!r} with {first!r} and {second!r}: {error}") from None

    def _choose(self, node: ast.BoolOp, text: str) -> Any:
        """Evaluate ``a or b`` (the first with known facts) or ``a and b`` (both true)."""
        if isinstance(node.op, ast.And):
            return all(self._walk(part, text) for part in node.values)
        for part in node.values[:-1]:
            try:
                return self._walk(part, text)
            except UnknownError:
                continue
        return self._walk(node.values[-1], text)

    def _find_argument(self, key: str) -> Any:
        value = self.args.get(key)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]  # Megatron-DeepSpeed keeps --num-experts as a list
        if value is None:
            raise UnknownError(f"args.{key}")
        return value

    def _find_name(self, name: str) -> Any:
        if name in self.values:
            return self.values[name]
        if name not in self.variables:
            if self.hints.get(name) is not None and not isinstance(self.hints[name], Mapping):
                return self.hints[name]
            raise UnknownError(name)
        # An expression that refers to its own variable counts as unknown.
        inner = replace(self, variables={key: texts for key, texts in self.variables.items() if key != name})
        values: dict[Any, str] = {}
        for expression in self.variables[name]:
            try:
                values.setdefault(inner.evaluate(expression), str(expression))
            except UnknownError:
                continue
        if len(values) > 1:
            listed = ", ".join(f"{value} by {text}" for value, text in values.items())
            raise MismatchError(f"the checkpoint contradicts itself about {name}: {listed}")
        if not values:
            raise UnknownError(name)
        return next(iter(values))

    def _call(self, function: str, arguments: Sequence[Any], text: str) -> int:
        try:
            match function, *arguments:
                case "own", dim:
                    return self._measure(self.name, dim)
                case "sibling", suffix, dim:
                    return self._measure(self.stem + suffix, dim)
                case "shape", expression, dim:
                    return self._measure_all(expression, dim)
                case "has", key:  # identifies the release of the script
                    if not self.args:
                        raise UnknownError("args")
                    return key in self.args
        except TypeError as error:
            raise ConfigError(f"patterns: {function} in {text!r} has arguments of a wrong type: {error}") from None
        advice = advise(function, ("own", "sibling", "shape", "has"))
        raise ConfigError(f"patterns: unknown function {function!r} in {text!r}. {advice}")

    def _measure(self, name: str, dim: int) -> int:
        shape = self.shapes.get(name)
        if shape is None or dim >= len(shape):
            raise UnknownError(f"dimension {dim} of {name}")
        return shape[dim]

    def _measure_all(self, expression: str, dim: int) -> int:
        """Return the size that all parameters with a matching name have."""
        if (expression, dim) in self.measured:
            return self.measured[expression, dim]
        regex = compile_regex(expression)
        sizes = {self._measure(name, dim) for name in self.shapes if regex.fullmatch(name)}
        if len(sizes) > 1:
            raise MismatchError(f"parameters {expression!r} differ in dimension {dim}: {sorted(sizes)}")
        if not sizes:
            raise UnknownError(f"a parameter {expression!r}")
        self.measured[expression, dim] = sizes.pop()
        return self.measured[expression, dim]


@lru_cache(maxsize=1 << 10)
def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError:
        raise ConfigError(f"patterns: {expression!r} is not an expression") from None
