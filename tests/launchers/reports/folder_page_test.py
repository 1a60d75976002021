"""Reports in a browser without a network."""

import json
import pathlib
import re
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.launchers import programs
from tests.launchers.digits import digits_config
from tf_dpsub.launchers.reports import folder_page
from tf_dpsub.launchers.training import training_run

PHONE, DESK = (390, 844), (1280, 900)
SMALL_PHONES = [(360, 740), (320, 568)]
TABLE = """# A study of <things>

```sh
tf-dpsub audit --workdir='out/a b'
```

**All** claims hold.

Steps claim ε = 1 <b>at</b> δ = 1e-05.

```sh
tf-dpsub train '--config.subspace_kwargs={"rank": 2}' >> log && true
```

| mechanism | ε |
|---|---|
| GEP | 0.5 |
"""
RESULT = {
    "test_accuracy": 0.93142,
    "test_loss": 0.25,
    "epsilon": 2.9301,
    "epsilon_rdp": 2.9301,
    "epsilon_pld": 2.5,
    "delta": 1e-05,
    "accountant": "rdp",
    "noise_multiplier": 1.43,
    "l2_norm_clip": 1.0,
    "sampling": "poisson",
    "sampling_rate": 0.178,
    "private_examples": 1438,
    "test_examples": 359,
    "batch_size": 256,
    "epochs": 2,
    "steps": 12,
    "parameters": 2410,
    "step_milliseconds": None,
    "peak_memory_mib": {"host": 856.0, "gpus": []},
    "devices": ["CPU (2 cores)"],
    "versions": {"python": "3.11.7"},
    "config": {"dataset": "digits", "optimizer": "DPSGD", "model": "mlp"},
    "summary": "test accuracy 0.93 at (ε = 2.94, δ = 1e-05)",
    "command": "tf-dpsub train",
}


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, and without a network."""
    options = webdriver.ChromeOptions()
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(f"--{flag}")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("There is no Chromium on the PATH.")
    options.binary_location = chromium
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory):
    """A folder of two runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("first", "second"):
        training_run.train(
            digits_config(),
            folder / name,
            command=f"tf-dpsub train --workdir={name}",
        )
    return folder


def show(browser, file, size=DESK, scheme="light"):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {
            "width": size[0],
            "height": size[1],
            "deviceScaleFactor": 1,
            "mobile": size != DESK,
        },
    )
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
    )
    browser.get(file.as_uri())
    return browser.find_element(By.TAG_NAME, "body").text


def requested(browser):
    """Addresses of all that the page has asked for."""
    return browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )


@pytest.mark.slow
class TestRun:
    def test_says_what_came_out(self, browser, runs):
        text = show(browser, runs / "second" / folder_page.FILE)
        result = json.loads((runs / "second" / "result.json").read_text())
        assert f"T{result['summary'].removeprefix('t')}." in text
        assert "digits: DPSGD, mlp" in text
        assert "Poisson sampling: every step drew each of the 1438" in text
        assert "noise multiplier σ" in text
        assert result["versions"]["tensorflow"] in text
        assert not requested(browser)
        assert not browser.get_log("browser")

    def test_headline_is_that_of_the_result(self, browser, runs):
        text = show(browser, runs / "second" / folder_page.FILE)
        result = json.loads((runs / "second" / "result.json").read_text())
        values = browser.find_elements(By.CSS_SELECTOR, ".headline .value")
        epsilon, delta, accuracy = (value.text for value in values)
        assert 0 <= float(epsilon) - result["epsilon"] < 0.01
        assert float(delta) == result["delta"]
        assert accuracy == f"{100 * result['test_accuracy']:.1f} %"
        assert text.startswith("digits: DPSGD, mlp\nε\n")
        assert text.count("digits: DPSGD, mlp") == 1

    def test_figure_has_a_description(self, browser, runs):
        show(browser, runs / "second" / folder_page.FILE)
        (figure,) = browser.find_elements(By.CSS_SELECTOR, "figure > svg")
        assert figure.accessible_name.startswith("digits: DPSGD, mlp.")
        rows = (runs / "second" / "metrics.csv").read_text().splitlines()
        last = dict(zip(rows[0].split(","), rows[-1].split(",")))
        share = f"{100 * float(last['val_accuracy']):.1f} % at 2"
        assert share in figure.accessible_name

    def test_runs_are_compared(self, browser, runs):
        text = show(browser, runs / "second" / folder_page.FILE)
        assert "second (this one)" in text
        assert re.search(r"^first 20\d\d-", text, re.MULTILINE)
        # The first one had none to be compared with.
        assert "Other runs" not in show(
            browser, runs / "first" / folder_page.FILE
        )

    def test_settings_are_unfolded(self, browser, runs):
        assert "l2_norm_clip" not in show(
            browser, runs / "second" / folder_page.FILE
        )
        browser.find_element(By.TAG_NAME, "summary").click()
        text = browser.find_element(By.TAG_NAME, "body").text
        assert "l2_norm_clip" in text

    def test_command_is_copied(self, browser, runs):
        show(browser, runs / "second" / folder_page.FILE)
        browser.execute_script(
            "Object.defineProperty(navigator, 'clipboard', {value: "
            "{writeText: async text => { window.copied = text; }}})"
        )
        button = browser.find_element(By.TAG_NAME, "button")
        assert button.text == "Copy"
        button.click()
        assert browser.execute_script("return window.copied") == (
            "tf-dpsub train --workdir=second"
        )
        assert button.text == "Copied"

    def test_is_legible_on_a_phone(self, browser, runs):
        show(browser, runs / "second" / folder_page.FILE, PHONE)
        width, visible, font = browser.execute_script(
            "const e = document.documentElement;"
            "return [e.scrollWidth, e.clientWidth, parseFloat("
            "getComputedStyle(document.body).fontSize)]"
        )
        assert width <= visible == PHONE[0]
        assert font >= 16
        button = browser.find_element(By.TAG_NAME, "button")
        assert button.size["height"] >= 36
        # Nor does the figure scroll. Its texts have 10 points.
        shown, points, width = browser.execute_script(
            "const svg = document.querySelector('figure > svg');"
            "return [svg.clientWidth, svg.viewBox.baseVal.width,"
            "svg.parentElement.clientWidth]"
        )
        assert 10 * shown / points >= 9.5
        assert shown <= width

    @pytest.mark.parametrize("size", SMALL_PHONES)
    def test_fits_a_small_phone(self, browser, runs, size):
        """The statement's table, too, and every figure of the headline."""
        show(browser, runs / "second" / folder_page.FILE, size)
        wider = browser.execute_script(
            """
            const selector = "html, .statement, .statement *, .headline *";
            return [...document.querySelectorAll(selector)]
              .filter(e => e.scrollWidth > e.clientWidth + 1
                && getComputedStyle(e).display !== "inline")
              .map(e => [e.outerHTML.slice(0, 80), e.scrollWidth]);
            """
        )
        assert wider == []
        table = browser.find_element(By.CSS_SELECTOR, ".statement table")
        rows = table.find_elements(By.CSS_SELECTOR, "tbody tr")
        assert len(rows) == 2 and "without amplification" in rows[1].text
        assert table.rect["x"] + table.rect["width"] <= size[0]

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_texts_stand_out(self, browser, runs, scheme):
        show(browser, runs / "second" / folder_page.FILE, scheme=scheme)
        for selector in (
            *("body", "th, td", "figure text", ".panel", ".result"),
            *(".headline dt", ".headline .value", ".headline .note"),
            *(".terms dd", ".statement th"),
        ):
            assert contrast(browser, selector) > 4.5, selector

    def test_is_written_again(self, runs, browser):
        file = runs / "first" / folder_page.FILE
        file.unlink()
        done = programs.run_program("report", f"--workdir={file.parent}")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{file}\n"
        assert "first (this one)" in show(browser, file)


def contrast(browser, selector):
    """Ratio of luminances of a text and of what is behind it (WCAG 2)."""
    return browser.execute_script(
        """
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => {
          const part = v => (v /= 255) <= 0.04045
            ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
          return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
        };
        const element = document.querySelector(arguments[0]);
        const own = getComputedStyle(element);
        const colour = element.closest("svg") ? own.fill : own.color;
        let behind = element, ground = [0, 0, 0, 0];
        while (behind && ground.length === 4 && ground[3] === 0) {
          ground = rgb(getComputedStyle(behind).backgroundColor);
          behind = behind.parentElement;
        }
        const lights = [light(rgb(colour)), light(ground)];
        return (Math.max(...lights) + 0.05) / (Math.min(...lights) + 0.05);
        """,
        selector,
    )


class TestHeadline:
    def page(self, folder, **changes):
        text = json.dumps(RESULT | changes)
        (folder / "result.json").write_text(text, "utf-8")
        page = folder_page.write(folder).read_text("utf-8")
        match = re.search(r'<dl class="headline">(.*?)</dl>', page, re.DOTALL)
        return re.sub(r"<[^>]*>", " ", match[1]).split()

    def test_epsilon_is_rounded_up(self, tmp_path):
        headline = " ".join(self.page(tmp_path))
        assert headline == (
            "ε 2.94 Poisson sampling, RDP δ 1e-05 1,438 private examples "
            "accuracy 93.1 % 359 test examples"
        )

    def test_what_is_not_private_says_so(self, tmp_path):
        headline = " ".join(
            self.page(tmp_path, epsilon="inf", epsilon_rdp="inf")
        )
        assert headline.startswith("ε ∞ not private δ")

    @pytest.mark.parametrize(
        "perplexity, shown", [(12.345, "12.35"), ("inf", "∞")]
    )
    def test_generation(self, tmp_path, monkeypatch, perplexity, shown):
        monkeypatch.delitem(RESULT, "test_accuracy")
        headline = self.page(
            tmp_path, test_perplexity=perplexity, test_bleu=23.46
        )
        assert " ".join(headline).endswith(
            f"perplexity {shown} 359 test examples BLEU 23.5"
        )


class TestOtherRuns:
    def test_files_of_other_programs_are_left_out(self, tmp_path):
        foreign = [
            "",
            "[]",
            "{}",
            RESULT | {"summary": 1},
            RESULT | {"config": "digits"},
            RESULT | {"epsilon": "much"},
            RESULT | {"delta": "1e-5"},
        ]
        for name, content in enumerate([RESULT, RESULT, *foreign]):
            folder = tmp_path / f"run_{name}"
            folder.mkdir()
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / "result.json").write_text(text, "utf-8")
        page = folder_page.write(tmp_path / "run_0").read_text("utf-8")
        assert re.findall(r"run_\d", page) == ["run_0", "run_1"]


class TestTable:
    @pytest.fixture(name="file")
    def _file(self, tmp_path):
        (tmp_path / "table.md").write_text(TABLE, "utf-8")
        return folder_page.write(tmp_path)

    def test_shows_the_table(self, file, browser):
        text = show(browser, file)
        assert text.startswith("A study of <things>\nAll claims hold.")
        assert "Steps claim ε = 1 <b>at</b> δ" in text
        row = browser.find_element(By.CSS_SELECTOR, "tbody tr")
        assert row.text == "GEP 0.5"
        command = browser.find_element(By.ID, "command")
        assert command.text == "tf-dpsub audit --workdir='out/a b'"
        code = browser.find_element(By.CSS_SELECTOR, "pre code")
        assert code.text in TABLE and ">> log && true" in code.text

    def test_needs_no_other_file(self, file):
        text = file.read_text("utf-8")
        assert not re.search(r'\b(src|href)="(?!#)', text)
        assert "@import" not in text and "url(http" not in text


def test_folder_without_results(tmp_path):
    with pytest.raises(ValueError, match="neither result.json nor table.md"):
        folder_page.write(pathlib.Path(tmp_path))


def test_a_result_without_fields(tmp_path):
    (tmp_path / "result.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match="result.json to have the field"):
        folder_page.write(tmp_path)
