"""BUILD lists each Python file of the tree, with what the file imports.

A library is a package of `tf_dpsub`, with its folders, or one of the modules
beside them; `tf_dpsub/__init__.py` is `:tf_dpsub`. A file with a main program
is a binary, a `*_test.py` a test, and what else a folder holds a library.
"""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("benchmarks", "configs", "launchers", "tests", "tf_dpsub")
RUNNER = "tests/main.py"
# The others, such as the data that a program reads, are written by hand.
ATTRIBUTES = ("testonly", "srcs", "args", "main", "deps")


def has_main(tree):
    """Whether a module has an `if __name__ == "__main__"`."""
    return any(
        isinstance(node, ast.If) and "__main__" in ast.dump(node.test)
        for node in tree.body
    )


def rule_and_name(path, tree):
    """The Bazel rule, and the name of the target, that a file belongs to."""
    stem = path.removesuffix(".py")
    folder, _, module = stem.rpartition("/")
    if module.endswith("_test"):
        return "py_test", stem
    if has_main(tree):
        return "py_binary", stem
    if folder.startswith("tf_dpsub/"):
        return "py_library", "/".join(folder.split("/")[:2])
    if folder == "tf_dpsub" and module != "__init__":
        return "py_library", stem
    return "py_library", folder


def imported_files(tree, files):
    """The files of the tree that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            path = name.replace(".", "/")
            package = path.rpartition("/")[0]
            candidates = (
                f"{path}.py",
                f"{path}/__init__.py",
                f"{package}.py",
                f"{package}/__init__.py",
            )
            yield from [file for file in candidates if file in files][:1]


def targets_of_tree(root):
    """What BUILD has to say, as {name: {attribute: value}}."""
    trees = {
        path.relative_to(root).as_posix(): ast.parse(path.read_bytes())
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }
    del trees[RUNNER]
    conftests = [path for path in trees if path.endswith("/conftest.py")]
    owners = {path: rule_and_name(path, tree) for path, tree in trees.items()}
    targets = {}
    for path, tree in trees.items():
        rule, name = owners[path]
        target = targets.setdefault(
            name, {"rule": rule, "srcs": set(), "deps": set()}
        )
        target["srcs"].add(path)
        used = set(imported_files(tree, trees))
        if rule == "py_test":
            used |= {
                conftest
                for conftest in conftests
                if path.startswith(conftest.removesuffix("conftest.py"))
            }
            target["srcs"].add(RUNNER)
            target |= {"args": {path}, "main": RUNNER}
        elif path.startswith("tests/"):
            target["testonly"] = True
        target["deps"] |= {f":{owners[file][1]}" for file in used}
        target["deps"].discard(f":{name}")
    return targets


def targets_of_build(text):
    """What a BUILD file says, in the form of `targets_of_tree`."""
    targets = {}
    calls = [
        statement.value
        for statement in ast.parse(text).body
        if isinstance(statement.value, ast.Call)
        and statement.value.func.id.startswith("py_")
    ]
    for call in calls:
        target = {"rule": call.func.id, "srcs": [], "deps": []}
        for keyword in call.keywords:
            if keyword.arg in ("name", *ATTRIBUTES):
                target[keyword.arg] = ast.literal_eval(keyword.value)
        name = target.pop("name")
        assert name not in targets, f"BUILD has two targets {name}"
        targets[name] = {
            key: set(value) if isinstance(value, list) else value
            for key, value in target.items()
        }
    return targets


def written(name, target):
    """A target as it stands in BUILD."""
    lines = [f'    name = "{name}",']
    for key in ATTRIBUTES:
        value = target.get(key)
        if isinstance(value, set):
            items = [f'"{item}"' for item in sorted(value)]
            if len(items) == 1:
                lines.append(f"    {key} = [{items[0]}],")
            elif items:
                lines.append(f"    {key} = [")
                lines += [f"        {item}," for item in items]
                lines.append("    ],")
        elif isinstance(value, str):
            lines.append(f'    {key} = "{value}",')
        elif value is not None:
            lines.append(f"    {key} = {value},")
    return "\n".join([f"{target['rule']}(", *lines, ")"])


def changes(said, wanted):
    """The text that brings a BUILD file up to date, empty if it is."""
    gone = [f"Remove {name}" for name in sorted(said.keys() - wanted.keys())]
    new = [
        f"Write, with what else it has, such as data:\n{written(name, target)}"
        for name, target in sorted(wanted.items())
        if said.get(name) != target
    ]
    return "\n".join(gone + new)


def test_build_file_is_true_to_the_tree():
    said = targets_of_build((ROOT / "BUILD").read_text())
    if text := changes(said, targets_of_tree(ROOT)):
        pytest.fail(f"BUILD is not true to the tree.\n{text}", pytrace=False)


def test_targets_do_not_depend_on_each_other_in_a_circle():
    edges = {
        name: {label.removeprefix(":") for label in target["deps"]}
        for name, target in targets_of_tree(ROOT).items()
    }
    graphlib.TopologicalSorter(edges).prepare()
