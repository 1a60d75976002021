import os

from tf_dpsub.launchers.terminal import live_line


def test_a_log_holds_whole_lines_alone(capsys):
    line = live_line.LiveLine()
    line.draw("50 %")
    line.print("epoch 1/2")
    assert capsys.readouterr().out == "epoch 1/2\n"


def test_on_a_terminal_each_line_replaces_the_live_one(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setattr(
        "shutil.get_terminal_size", lambda **_: os.terminal_size((5, 24))
    )
    line = live_line.LiveLine()
    line.draw("50 % of all")
    line.print("epoch 1/2")
    assert capsys.readouterr().out == "\r\033[K50 %\r\033[Kepoch 1/2\n"
