import io
import time

from jserve.cli.progress import StartReport


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_lines_only():
    stream = io.StringIO()
    report = StartReport(stream)
    report.line("weights: 1 GiB")
    for done in range(4):
        report.progress("compile", done, 3)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "weights: 1 GiB"
    assert len(lines) == 2 and lines[1].startswith("compile: 3 in ")


def test_bytes_are_shown_as_such():
    stream = io.StringIO()
    report = StartReport(stream)
    report.progress("load weights", 0, 538_060_032)
    report.progress("load weights", 538_060_032, 538_060_032)
    assert stream.getvalue().startswith("load weights: 538 MB in ")


def test_a_part_of_bytes_is_told_in_the_unit_of_the_whole():
    stream = Terminal()
    report = StartReport(stream)
    report.progress("load weights", 1_972_224, 538_060_032)
    report.close()
    assert "2 of 538 MB" in stream.getvalue() and "1972224" not in stream.getvalue()


def test_a_terminal_gets_a_bar_and_a_line_for_each_finished_phase():
    stream = Terminal()
    report = StartReport(stream)
    for phase in ("weights", "compile"):
        for done in range(3):
            report.progress(phase, done, 2)
        report.line(f"after {phase}")
    text = stream.getvalue()
    assert "weights: 2 in " in text and "compile: 2 in " in text and "after compile" in text
    report.close()


def test_quiet_still_keeps_the_seconds():
    stream = io.StringIO()
    report = StartReport(stream, quiet=True)
    report.line("x")
    time.sleep(0.02)
    report.progress("compile", 1, 1)
    assert stream.getvalue() == ""
    assert report.seconds["compile"] >= 0.02, "a phase begins where what was before it ends"
