"""Above the chapters: `python -m minivllm`, the command line."""

from minivllm.cli import main

if __name__ == "__main__":
    main(prog_name="python -m minivllm")
