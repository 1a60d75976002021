"""What a browser shows of a report, without a network."""

import json
import pathlib
import re
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from launchers import experiment, report_page
from tests.launchers import programs
from tests.launchers.train_test import digits_config

PHONE, DESK = (390, 844), (1280, 900)
TABLE = """# A study of <things>

```sh
tf-dpsub audit --workdir='out/a b'
```

**All** claims hold.

Steps claim ε = 1 <b>at</b> δ = 1e-05.

| mechanism | ε |
|---|---|
| GEP | 0.5 |
"""


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
        experiment.train(
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
            "mobile": size == PHONE,
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
        text = show(browser, runs / "second" / report_page.FILE)
        result = json.loads((runs / "second" / "result.json").read_text())
        assert f"T{result['summary'].removeprefix('t')}." in text
        assert "digits: DPSGD, mlp" in text
        assert "Poisson sampling: every step drew each of the 1438" in text
        assert "noise multiplier σ" in text
        assert result["versions"]["tensorflow"] in text
        assert not requested(browser)
        assert not browser.get_log("browser")

    def test_figure_has_a_description(self, browser, runs):
        show(browser, runs / "second" / report_page.FILE)
        (figure,) = browser.find_elements(By.CSS_SELECTOR, "figure > svg")
        assert figure.accessible_name.startswith("digits: DPSGD, mlp.")
        rows = (runs / "second" / "metrics.csv").read_text().splitlines()
        last = dict(zip(rows[0].split(","), rows[-1].split(",")))
        share = f"{100 * float(last['val_accuracy']):.1f} % at 2"
        assert share in figure.accessible_name

    def test_runs_are_compared(self, browser, runs):
        text = show(browser, runs / "second" / report_page.FILE)
        assert "second (this one)" in text
        assert re.search(r"^first 20\d\d-", text, re.MULTILINE)
        # The first one had none to be compared with.
        assert "Other runs" not in show(
            browser, runs / "first" / report_page.FILE
        )

    def test_settings_are_unfolded(self, browser, runs):
        assert "l2_norm_clip" not in show(
            browser, runs / "second" / report_page.FILE
        )
        browser.find_element(By.TAG_NAME, "summary").click()
        text = browser.find_element(By.TAG_NAME, "body").text
        assert "l2_norm_clip" in text

    def test_command_is_copied(self, browser, runs):
        show(browser, runs / "second" / report_page.FILE)
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
        show(browser, runs / "second" / report_page.FILE, PHONE)
        width, visible, font = browser.execute_script(
            "const e = document.documentElement;"
            "return [e.scrollWidth, e.clientWidth, parseFloat("
            "getComputedStyle(document.body).fontSize)]"
        )
        assert width <= visible == PHONE[0]
        assert font >= 16
        button = browser.find_element(By.TAG_NAME, "button")
        assert button.size["height"] >= 36

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_texts_stand_out(self, browser, runs, scheme):
        show(browser, runs / "second" / report_page.FILE, scheme=scheme)
        for selector in ("body", "th, td", "figure text", ".panel"):
            assert contrast(browser, selector) > 4.5, selector

    def test_is_written_again(self, runs, browser):
        file = runs / "first" / report_page.FILE
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


class TestTable:
    @pytest.fixture(name="file")
    def _file(self, tmp_path):
        (tmp_path / "table.md").write_text(TABLE, "utf-8")
        return report_page.write(tmp_path)

    def test_shows_the_table(self, file, browser):
        text = show(browser, file)
        assert text.startswith("A study of <things>\nAll claims hold.")
        assert "Steps claim ε = 1 <b>at</b> δ" in text
        row = browser.find_element(By.CSS_SELECTOR, "tbody tr")
        assert row.text == "GEP 0.5"
        command = browser.find_element(By.ID, "command")
        assert command.text == "tf-dpsub audit --workdir='out/a b'"

    def test_needs_no_other_file(self, file):
        text = file.read_text("utf-8")
        assert not re.search(r'\b(src|href)="(?!#)', text)
        assert "@import" not in text and "url(http" not in text


def test_folder_without_results(tmp_path):
    with pytest.raises(ValueError, match="neither result.json nor table.md"):
        report_page.write(pathlib.Path(tmp_path))
