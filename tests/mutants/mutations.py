"""Small changes of meaning that a file allows, and a sample of them over many files.

Cosmic Ray has the operators and writes the changed source. Of its operators those are taken that
make one small change each; what cannot change what the program does is left out by `_noise`.
"""

from __future__ import annotations

import ast
import difflib
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider

_ARITHMETIC = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul")
_ARITHMETIC += ("LShift_RShift", "RShift_LShift", "BitOr_BitAnd", "BitAnd_BitOr")
_COMPARISONS = ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")
_COMPARISONS += ("Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_GtE", "LtE_Gt", "Gt_LtE", "GtE_Lt")
_UNARY = ("Delete_Not", "Delete_USub")
_OTHERS = ("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr")
_OTHERS += ("ReplaceOrWithAnd", "ReplaceBreakWithContinue", "ReplaceContinueWithBreak")
_OTHERS += ("ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop")
_PROVIDED = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in _ARITHMETIC),
    *(f"ReplaceComparisonOperator_{pair}" for pair in _COMPARISONS),
    *(f"ReplaceUnaryOperator_{pair}" for pair in _UNARY),
    *_OTHERS,
)
# Calls whose arguments are words for people.
_TELLS = {"warn", "warning", "info", "debug", "error", "print", "add_argument", "describe"}


class DropCall(Operator):
    """A statement that only calls something (waits, starts, closes) is not made."""

    def mutation_positions(self, node):
        call = self._call(node)
        if call is not None:
            yield (call.start_pos, call.end_pos)

    def mutate(self, node, index):
        call = self._call(node)
        prefix = call.get_first_leaf().prefix
        node.children[0] = parso.python.tree.Keyword("pass", call.start_pos, prefix)
        return node

    @staticmethod
    def _call(node):
        """The call that is all of a simple statement, or None."""
        if node.type != "simple_stmt" or node.children[0].type != "atom_expr":
            return None
        last = node.children[0].children[-1]
        return node.children[0] if last.type == "trailer" and last.children[0] == "(" else None

    @classmethod
    def examples(cls):
        return (Example("work.wait()\n", "pass\n"),)


_PROVIDER = OperatorProvider()
OPERATORS: dict[str, Operator] = {name: _PROVIDER[name]() for name in _PROVIDED}
OPERATORS["DropCall"] = DropCall()


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed copy of one file."""

    path: str
    """Relative to the repository's root."""
    operator: str
    occurrence: int
    """Number of the operator's place in the file."""
    line: int
    end_line: int
    """Last line of the statement (of its head, where it has a body) that is changed."""
    column: int
    at_import: bool
    """The line stands in no function: it runs once, for whichever test imports the file."""

    def apply(self, source: str) -> str:
        """The file as the mutant has it."""
        changed = mutate_code(source, OPERATORS[self.operator], self.occurrence)
        assert changed is not None and changed != source
        return changed

    def means_something(self, source: str) -> bool:
        """Returns whether the changed file is another program at all, and no mistake in grammar."""
        try:
            return ast.dump(ast.parse(self.apply(source))) != ast.dump(ast.parse(source))
        except SyntaxError:
            return False
        except AttributeError:
            # Cosmic Ray cannot make all that it proposes: in a tuple of exceptions, one with a dot.
            return False

    def diff(self, source: str) -> str:
        """Returns the change as a unified diff with one line of context."""
        lines = source.splitlines(), self.apply(source).splitlines()
        return "\n".join(list(difflib.unified_diff(*lines, n=1, lineterm=""))[2:])


def candidates(path: str, source: str) -> list[Mutant]:
    """All mutants of a file whose change can mean something, in the order of the text."""
    tree = ast.parse(source)
    noise, heads, inside = _noise(tree), _heads(tree), _inside_functions(tree)
    seen = dict.fromkeys(OPERATORS, -1)
    mutants = []
    for node in ast_nodes(get_ast(source)):
        for name, operator in OPERATORS.items():
            for start, stop in operator.mutation_positions(node):
                seen[name] += 1
                if any(first <= start and stop <= last for first, last in noise):
                    continue
                # Cosmic Ray takes the star before parameters that go by name for a product.
                if node.parent is not None and node.parent.type in ("parameters", "lambdef"):
                    continue
                line, end_line = heads.get(start[0], (start[0], start[0]))
                mutants.append(
                    Mutant(
                        path=path,
                        operator=name,
                        occurrence=seen[name],
                        line=line,
                        end_line=end_line,
                        column=start[1],
                        at_import=line not in inside,
                    )
                )
    return mutants


def sample(sources: Mapping[str, str], count: int, seed: int) -> list[Mutant]:
    """Returns about `count` mutants, the same for the same seed and sources.

    Every file that has any is asked for at least one, and for more as the root of its number of
    places: a file of hundreds of lines does not crowd out the small ones. Within a file places are
    drawn first and one change of each second: numbers, which can go up and down, count once.
    """
    places = {path: _by_place(candidates(path, text)) for path, text in sorted(sources.items())}
    weights = {path: math.sqrt(len(there)) for path, there in places.items() if there}
    shares = _shares(weights, count, {path: len(places[path]) for path in weights})
    drawn = []
    for path, share in shares.items():
        chance = random.Random(f"{seed}:{path}")
        shuffled = chance.sample(places[path], len(places[path]))
        choices = (chance.choice(mutants) for mutants in shuffled)
        good = (mutant for mutant in choices if mutant.means_something(sources[path]))
        drawn += itertools.islice(good, share)
    return drawn


def _by_place(mutants: list[Mutant]) -> list[list[Mutant]]:
    groups: dict[tuple[int, int, str], list[Mutant]] = {}
    for mutant in mutants:
        kind = mutant.operator.split("_")[0]
        groups.setdefault((mutant.line, mutant.column, kind), []).append(mutant)
    return list(groups.values())


def _shares(weights: Mapping[str, float], count: int, most: Mapping[str, int]) -> dict[str, int]:
    """One each, and the rest one by one to who is farthest below his share by weight."""
    shares = dict.fromkeys(weights, 1)
    while sum(shares.values()) < min(count, sum(most.values())):
        open_ones = [path for path in shares if shares[path] < most[path]]
        path = max(open_ones, key=lambda path: (weights[path] / (shares[path] + 0.5), path))
        shares[path] += 1
    return shares


_Place = tuple[int, int]


def _noise(tree: ast.Module) -> list[tuple[_Place, _Place]]:
    """Places where a change means nothing: types, decorators, messages, invariants, interfaces."""
    return [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for node in _noisy(tree)
    ]


def _noisy(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from node.decorator_list
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            every += [argument for argument in (node.args.vararg, node.args.kwarg) if argument]
            yield from (argument.annotation for argument in every if argument.annotation)
            if node.returns:
                yield node.returns
            if node.name == "__repr__":
                yield node
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.keyword) and node.arg == "strict":  # asserts equal lengths
            yield node.value
        elif _means_nothing(node):
            yield node


def _means_nothing(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return True
        case ast.Assign():
            return _is_type(node.value) or bool(_names(node.targets) & {"__all__", "__version__"})
        case ast.Call():
            return _called(node.func) in _TELLS
        case ast.Constant():
            return _is_large(node.value)
        case ast.If():
            return bool(_names([node.test]) & {"TYPE_CHECKING", "__name__"})
    return False


def _is_large(value: object) -> bool:
    """Numbers of 10 and more are limits and sizes; operators change them by 1, which is nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 10


def _names(nodes: list[ast.expr]) -> set[str]:
    return {child.id for node in nodes for child in ast.walk(node) if isinstance(child, ast.Name)}


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))


def _is_type(value: ast.expr) -> bool:
    """Returns whether it is an alias such as `Place = Callable[[int], str] | None`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_type(value.left) or _is_type(value.right)
    return isinstance(value, ast.Subscript) and _called(value.value) in {
        *("Callable", "Literal", "Union", "Optional", "Mapping", "Sequence"),
        *("dict", "list", "tuple", "set"),
    }


def _heads(tree: ast.Module) -> dict[int, tuple[int, int]]:
    """Returns by line the first and last line of its innermost statement, bodies left out."""
    heads: dict[int, tuple[int, int]] = {}
    for node in ast.walk(tree):  # breadth first: inner statements come later and replace outer ones
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        last = body[0].lineno - 1 if body else node.end_lineno
        span = (node.lineno, max(node.lineno, last))
        heads.update(dict.fromkeys(range(span[0], span[1] + 1), span))
    return heads


def _inside_functions(tree: ast.Module) -> set[int]:
    """Lines of the bodies of functions; defaults and decorators are no part of them."""
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}
