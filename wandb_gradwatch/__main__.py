"""python -m wandb_gradwatch: the command line, also where its script is not on the PATH."""

from ._cli import PROGRAM, main

main(prog_name=PROGRAM)
