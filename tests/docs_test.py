"""README and docs/ do what they say: code runs, commands and links exist.

Blocks of one page that are marked `python` run in order, in one namespace and
in an empty folder. Two kinds of comments are claims, and tested:

- after an expression, what it is: `epsilon(...)  # 0.894` (numbers are compared
  to as many digits as are written);
- as the last line of a block, what it raises: `# ValueError: Expected ...`,
  the beginning of the message.
"""

import ast
import configparser
import importlib.util
import inspect
import pathlib
import re
import shlex

import griffe
import pytest
import yaml

import tf_dpsub
from tf_dpsub import optimizers
from tf_dpsub.launchers import cli

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]
README = "../README.md"
FRONT = "index.md"

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
RAISED = re.compile(r"# (\w+): (.+)$")
REFERENCE = re.compile(r"^::: (\S+)$", re.MULTILINE)
DEFINES = re.compile(r"DEFINE_\w+|add_argument")


def blocks(text, language):
    """Pairs of the line at which a block begins, and what it holds."""
    return [
        (text.count("\n", 0, match.start()) + 2, match[3])
        for match in FENCE.finditer(text)
        if match[2] == language
    ]


def with_blocks(language):
    """Names of pages that have blocks of a language, the README's included."""
    return [
        name
        for name in (*NAMES, README)
        if blocks((DOCS / name).read_text("utf-8"), language)
    ]


def without_blocks(text):
    return FENCE.sub("", text)


# Python.


class Claim(AssertionError):
    """A comment of a page that is not true."""


def same(value, written):
    """Whether a value is what a comment says."""
    try:
        number = float(written)
    except ValueError:
        return repr(value) == written
    digits = len(re.sub(r"e.*$|^0\.0*|\D", "", written))
    return float(f"{float(value):.{max(digits, 1)}g}") == number


def run_block(code, name, line, namespace):
    """Runs a block, and checks what its comments claim.

    Raises:
        Claim: if one of them is not true.
    """
    lines = code.rstrip().splitlines()
    raised = RAISED.fullmatch(lines[-1]) if lines else None
    # Where an error is shown, it is in the page.
    code = "\n" * (line - 1) + code
    try:
        for node in ast.parse(code).body:
            written = None
            if isinstance(node, ast.Expr):
                last = code.splitlines()[node.end_lineno - 1]
                written = re.search(r"  # (\S.*)$", last[node.end_col_offset :])
            tree = [node]
            if written is None:
                exec(compile(ast.Module(tree, []), name, "exec"), namespace)
                continue
            value = eval(
                compile(ast.Expression(node.value), name, "eval"), namespace
            )
            if not same(value, written[1]):
                raise Claim(
                    f"{name}:{node.lineno}: {written[1]} is written, "
                    f"{value!r} found"
                )
    except Claim:
        raise
    except Exception as error:
        if raised is None:
            raise
        found = f"{type(error).__name__}: {error}"
        if not found.startswith(f"{raised[1]}: {raised[2]}"):
            raise Claim(f"{name}:{line}: raises {found}") from error
    else:
        if raised is not None:
            raise Claim(f"{name}:{line}: does not raise {raised[1]}")


def _given_to_distributed(folder):
    """What the page on several devices takes as known."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_dpsub

    def plain_model():
        return tf_dpsub.models.mlp((3,), (4,), 2)

    return {
        "tf": tf,
        "tf_dpsub": tf_dpsub,
        "plain_model": plain_model,
        "optimizer": tf_dpsub.optimizers.DPSGD(
            "sgd", l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8
        ),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "x": np.ones([8, 3], "float32"),
        "y": np.zeros([8], "int64"),
    }


def _given_to_language_models(folder):
    """Checkpoints of one layer, where the page names folders."""
    from tests.models import checkpoints

    for name in ("bert_folder", "masked_bert_folder", "gpt2_folder"):
        (folder / name).mkdir()
    tensors, _ = checkpoints.tensors_of("bert")
    tensors = {k: v for k, v in tensors.items() if "layer.1." not in k}
    for name, head in (
        ("bert", {}),
        ("masked_bert", checkpoints.masked_head("bert")),
    ):
        checkpoints.write(
            folder / f"{name}_folder",
            "bert",
            tensors | head,
            num_hidden_layers=1,
        )
    checkpoints.write_gpt2_of_bytes(folder / "gpt2_folder", layers=1)
    return {}


GIVEN = {
    "distributed.md": _given_to_distributed,
    "language_models.md": _given_to_language_models,
}


def test_the_front_page_shows_what_the_readme_shows():
    """The same lines, which are run as the README's, and the figure."""
    front, readme = ((DOCS / name).read_text() for name in (FRONT, README))
    (code,) = (code for _, code in blocks(front, "python"))
    assert code == blocks(readme, "python")[0][1]
    (command,) = (code for _, code in blocks(front, "sh"))
    assert commands(command)[0] in [
        words for _, code in blocks(readme, "sh") for words in commands(code)
    ]
    figures = [
        [pathlib.Path(target).name for image, _, target in LINK.findall(text)]
        for text in (front, readme)
    ]
    assert "digits_methods_accuracy.png" in set(figures[0]) & set(figures[1])
    assert re.search(
        r"## What makes it different\n\n(- .*\n(  .*\n)*){3}\n", front
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in with_blocks("python") if name != FRONT]
)
def test_python_blocks_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    if name in GIVEN:
        namespace |= GIVEN[name](tmp_path)
    for line, code in blocks((DOCS / name).read_text(), "python"):
        run_block(code, f"docs/{name}", line, namespace)


@pytest.mark.parametrize(
    "code",
    [
        "1 + 1  # 3",
        "0.8936  # 0.895",
        "'a'  # 'b'",
        "int('a')\n# TypeError: invalid",
        "int('a')\n# ValueError: something else",
        "int('1')\n# ValueError: invalid",
    ],
)
def test_a_false_comment_is_found(code):
    with pytest.raises(Claim):
        run_block(code, "page", 1, {})


def test_true_comments_pass():
    run_block(
        "x = 0.8936\nx  # 0.894\n(x,\n 2)  # (0.8936, 2)\n2e-5  # 2e-5",
        "page",
        1,
        {},
    )
    run_block("int('a')\n# ValueError: invalid literal", "page", 1, {})
    with pytest.raises(ZeroDivisionError):
        run_block("1 / 0", "page", 1, {})


# Commands.


def commands(code):
    """The commands of a shell block, each a list of words."""
    found, pending = [], ""
    for line in code.splitlines():
        pending += line
        if pending.endswith("\\"):
            pending = pending[:-1] + " "
            continue
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quotation that goes on
            pending += "\n"
            continue
        pending = ""
        if words:
            found.append(words)
    if pending:
        raise Claim(f"a command does not end: {pending}")
    return found


def module_file(name):
    """The file of a module of the repository, or None."""
    path = ROOT.joinpath(*name.split("."))
    parts = (path / "__init__.py", path / "__main__.py")
    for file in (path.with_suffix(".py"), *parts):
        if file.is_file():
            return file
    return None


def _defines(node):
    """Whether a node of a program is a call that defines a flag."""
    function = getattr(node, "func", None)
    name = getattr(function, "attr", getattr(function, "id", ""))
    return bool(DEFINES.fullmatch(name))


def _words(nodes):
    """The strings in some nodes of a program, as names of flags."""
    return {
        part.value.removeprefix("--")
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def defined_flags(module, seen=None):
    """Names of the flags that a module and its imports define."""
    seen = set() if seen is None else seen
    file = module_file(module)
    if file is None or file in seen:
        return set()
    seen.add(file)
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported = [node.module]
            imported += [f"{node.module}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Call) and _defines(node):
            found |= _words(node.args[:1])
        elif isinstance(node, ast.For) and any(map(_defines, ast.walk(node))):
            # Flags that a loop defines, one after another.
            found |= _words([node.iter])
        for name in imported:
            if name.startswith(("tf_dpsub.launchers", "benchmarks")):
                found |= defined_flags(name, seen)
    return found


def config_of(path):
    """The config that a file of configs/ gives."""
    spec = importlib.util.spec_from_file_location("config", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


def check_flags(module, words):
    """Checks that a program defines each flag that it is called with.

    Raises:
        Claim: if not.
    """
    config = None
    known = defined_flags(module)
    for word in words:
        if not word.startswith("--"):
            continue
        flag, _, value = word[2:].partition("=")
        if flag == "config":
            if not (ROOT / value).is_file():
                raise Claim(f"{module}: there is no config {value}")
            config = config_of(value)
        if flag.startswith("config."):
            field = flag.split(".")[1]
            if config is None or field not in config:
                raise Claim(f"{module}: the config has no field {field}")
            flag = "config"
        if flag not in known and flag.removeprefix("no") not in known:
            raise Claim(f"{module} has no flag --{flag}")


def check_command(words):
    """Checks that a command of a page exists.

    Raises:
        Claim: if not.
    """
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]  # variables of the environment
    program, *rest = words
    if program in ("export", "done"):
        return
    if program == "for":
        assert rest[1] == "in" and rest[-1] == "do", words
        return
    if program == "make":
        targets = re.findall(
            r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE
        )
        for target in rest:
            if target not in targets:
                raise Claim(f"make has no target {target}")
        return
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    if program == "pip":
        extras = set(setup["options.extras_require"])
        assert rest[0] == "install", words
        for extra in re.findall(r"^\.\[(.*)\]$", rest[-1]):
            if not set(extra.split(",")) <= extras:
                raise Claim(f"setup.cfg has no extra {extra}")
        return
    scripts = setup["options.entry_points"]["console_scripts"]
    if program == "python" and rest[0] == "-m":
        module, rest = rest[1], rest[2:]
    elif program == "python" and rest[0].startswith("docs/examples/"):
        module = rest[0].removesuffix(".py").replace("/", ".")
        rest = rest[1:]
    elif not re.search(rf"^{re.escape(program)}\b *=", scripts, re.MULTILINE):
        raise Claim(f"{program} is no program of this repository")
    elif rest[0] not in cli.COMMANDS:
        raise Claim(f"{program} has no command {rest[0]}")
    else:
        module, rest = f"tf_dpsub.launchers.{rest[0]}", rest[1:]
    if module_file(module) is None:
        raise Claim(f"there is no module {module}")
    check_flags(module, rest)


@pytest.mark.parametrize("name", with_blocks("sh"))
def test_commands_exist(name):
    for _, code in blocks((DOCS / name).read_text(), "sh"):
        for words in commands(code):
            check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "tf-dpsub training --workdir=out",
        "tf-dpsub train --work_dir=out",
        "tf-dpsub train --config=configs/none.py",
        "tf-dpsub train --config=configs/digits_dpsgd.py --config.epoch=3",
        "tf-dpsub training --workdir=out",
        "python -m benchmarks.none",
        "python -m benchmarks.rgp_step --ranks=3",
        "make everything",
        'pip install ".[everything]"',
        "some-program",
    ],
)
def test_a_command_that_does_not_exist_is_found(command):
    (words,) = commands(command)
    with pytest.raises(Claim):
        check_command(words)


def test_commands_are_parsed():
    code = "for a in 1 2; do\n  x --a \\\n    --b='1\n2' # c\ndone\n\nmake y\n"
    assert commands(code) == [
        ["for", "a", "in", "1", "2;", "do"],
        ["x", "--a", "--b=1\n2"],
        ["done"],
        ["make", "y"],
    ]


# Links, images and the site.


def problems_of_links(page, text):
    found = []
    for image, shown, target in LINK.findall(without_blocks(text)):
        if image and not shown.strip():
            found.append(f"{target} has no text that stands for it")
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        file = page.parent / path if path else page
        if not file.is_file():
            found.append(f"there is no {target}")
        elif anchor and anchor not in anchors(file.read_text("utf-8")):
            found.append(f"{path} has no heading {anchor}")
    return found


def anchors(text):
    """The names by which the headings of a page can be linked."""
    names = set()
    for heading in re.findall(r"^#+ (.+)$", without_blocks(text), re.MULTILINE):
        ascii_only = re.sub(r"[^\x00-\x7f]", "", heading)
        words = re.sub(r"[^\w\s-]", "", ascii_only).strip().lower()
        names.add(re.sub(r"[-\s]+", "-", words))
    return names


@pytest.mark.parametrize("name", [*NAMES, README])
def test_links_and_images_exist(name):
    page = DOCS / name
    assert problems_of_links(page, page.read_text("utf-8")) == []


def test_a_link_to_nothing_is_found():
    page = DOCS / "index.md"
    for text in (
        "[a](none.md)",
        "![](figures/gep_mnist_training.png)",
        "![\n](figures/gep_mnist_training.png)",
        "![a](figures/none.png)",
        "[a](results.md#none)",
    ):
        assert len(problems_of_links(page, text)) == 1, text
    for text in ("[a](results.md#accounting)", "[a](https://example.org/x)"):
        assert problems_of_links(page, text) == [], text


@pytest.mark.parametrize(
    "figure", sorted(p.name for p in (DOCS / "figures").glob("*.svg"))
)
def test_drawings_have_a_title_and_are_whole(figure):
    from xml.etree import ElementTree

    root = ElementTree.parse(DOCS / "figures" / figure).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert root.find(f"{space}title").text
    assert root.find(f"{space}desc").text
    used = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert f"figures/{figure}" in used


def _in_navigation(part):
    if isinstance(part, str):
        return [part]
    values = part.values() if isinstance(part, dict) else part
    return [name for value in values for name in _in_navigation(value)]


def test_the_site_has_every_page_once_and_needs_no_network():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(_in_navigation(site["nav"])) == NAMES
    assert site["theme"]["font"] is False
    assert "://" not in (ROOT / "mkdocs.yml").read_text("utf-8")


MODULES = sorted(
    path.parent.name
    for path in (ROOT / "tf_dpsub").glob("*/__init__.py")
    if path.parent.name in tf_dpsub.__all__
)


def documented(module):
    page = DOCS / "api" / f"{module}.md"
    return REFERENCE.findall(page.read_text("utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(module):
    package = importlib.import_module(f"tf_dpsub.{module}")
    names = [name.split(".")[-1] for name in documented(module)]
    assert len(set(names)) == len(names)
    public = {n for n in package.__all__ if callable(getattr(package, n))}
    assert set(names) == public
    for name in documented(module):
        owner, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(owner), last)
        assert found is getattr(package, last)
        assert found.__doc__


@pytest.fixture(scope="module", name="reference")
def _reference():
    """What the site reads of the package, as it is set to read it."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    (plugin,) = (p for p in site["plugins"] if "mkdocstrings" in p)
    options = plugin["mkdocstrings"]["handlers"]["python"]["options"]
    return griffe.load(
        "tf_dpsub",
        search_paths=[ROOT],
        extensions=griffe.load_extensions(
            *(str(ROOT / name) for name in options["extensions"])
        ),
        docstring_parser=options["docstring_style"],
        docstring_options=options["docstring_options"],
    )


def listed(reference, name):
    """Names of the arguments and attributes that a page tells of."""
    found = reference[name.removeprefix("tf_dpsub.")]
    found = found.final_target if found.is_alias else found
    return {
        item.name
        for section in found.docstring.parsed
        if section.kind.value in ("parameters", "attributes")
        for item in section.value
    }


def taken(public):
    """Names of the arguments of a class or function, inherited ones included.

    Of classes of Keras, what `**kwargs` passes to them is left out.
    """
    names = set()
    for owner in public.__mro__ if inspect.isclass(public) else [public]:
        if not owner.__module__.startswith("tf_dpsub"):
            break
        if owner is not public and "__init__" not in vars(owner):
            continue
        parameters = inspect.signature(owner).parameters.values()
        names |= {p.name for p in parameters if p.kind.name[:4] != "VAR_"}
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return names


@pytest.mark.parametrize(
    "name", [name for module in MODULES for name in documented(module)]
)
def test_the_reference_lists_all_arguments(name, reference):
    owner, _, last = name.rpartition(".")
    public = getattr(importlib.import_module(owner), last)
    if inspect.isclass(public) and issubclass(public, Exception):
        return
    assert taken(public) <= listed(reference, name)


def test_inherited_arguments_are_in_the_reference(reference):
    """With those of its own, in the place of `**kwargs`."""
    expected = taken(optimizers.PrivateOptimizer)
    assert {"optimizer", "noise_multiplier", "seed"} < expected
    assert listed(reference, "tf_dpsub.optimizers.AdaptiveDPSGD") > expected
    expected_of_dpsgd = expected | {"layer_clips", "bands"}
    assert listed(reference, "tf_dpsub.optimizers.DPSGD") == expected_of_dpsgd
    name = "tf_dpsub.optimizers.GEP"
    assert listed(reference, name) > expected | {"subspace", "residual"}
    (parsed,) = (
        section.value
        for section in reference["optimizers.GEP"].final_target.docstring.parsed
        if section.kind.value == "parameters"
    )
    clip = {p.name: p.description for p in parsed}["l2_norm_clip"]
    assert clip == "float, the norm to which embeddings are clipped."
    signature = reference["optimizers.GEP"].final_target.parameters
    assert {p.name for p in signature} == {"self"} | listed(reference, name)


def test_blocks_are_run_or_are_no_code():
    kinds = {
        match[2] or "none"
        for page in PAGES
        for match in FENCE.finditer(page.read_text("utf-8"))
    }
    assert kinds <= {"python", "sh", "text"}
