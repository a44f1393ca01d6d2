from sglang.srt.managers.scheduler import _run


def run_detokenizer_process(arguments, writer):
    _run(arguments, writer, "detokenizer")
