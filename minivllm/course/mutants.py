"""Above the chapters: small changes to an answer, each of which a check ought to notice.

Every change is one of those that people make: a comparison off by its boundary, plus for minus, a number one
too large, a condition turned round, a line left out, a value not returned.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
    ast.MatMult: ast.Add,
}


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(what was changed, the changed source) for each change to a function, in the order of its lines.

    The signature and the docstring stay.
    """
    tree = ast.parse(source)
    for number in range(sum(1 for _ in ast.walk(tree))):
        for choice in range(2):
            changed = copy.deepcopy(tree)
            function = changed.body[0]
            assert isinstance(function, ast.FunctionDef)
            node = list(ast.walk(changed))[number]
            if not _in_body(function, node):
                continue
            before = ast.unparse(node) if isinstance(node, ast.expr | ast.stmt) else ""
            if _change(node, choice):
                after = ast.unparse(ast.fix_missing_locations(changed))
                line = getattr(node, "lineno", 0)
                yield f"line {line}: {before.splitlines()[0][:60]!r}, change {choice + 1}", after


def _in_body(function: ast.FunctionDef, node: ast.AST) -> bool:
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    body = [statement for statement in function.body if statement is not docstring]
    return any(node is inner for statement in body for inner in ast.walk(statement))


def _change(node: ast.AST, choice: int) -> bool:
    """Change a node in one of its ways; False where it has no such way."""
    if isinstance(node, ast.Compare) and choice < len(node.ops):
        node.ops[choice] = COMPARISONS[type(node.ops[choice])]()
    elif isinstance(node, ast.BinOp | ast.AugAssign) and choice == 0:
        node.op = OPERATIONS[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool) and choice == 0:
        node.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:  # a bool has one way only
        node.value += (1, -1)[choice]
    elif isinstance(node, ast.BoolOp) and choice == 0:
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and choice == 0:
        node.op = ast.UAdd()
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and choice == 0:
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and node.value is not None and choice == 0:
        node.value = ast.Constant(None)
    elif isinstance(node, ast.Slice) and choice == 0 and node.upper is not None:
        node.upper = ast.BinOp(node.upper, ast.Sub(), ast.Constant(1))
    elif isinstance(node, ast.Slice) and choice == 1 and node.lower is not None:
        node.lower = ast.BinOp(node.lower, ast.Add(), ast.Constant(1))
    elif isinstance(node, ast.For | ast.With | ast.If | ast.While | ast.FunctionDef) and choice == 1:
        if len(node.body) < 2:
            return False
        del node.body[-1]
    else:
        return False
    return True
