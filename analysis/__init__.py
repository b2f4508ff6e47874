"""Tables, statistics and figures over the files of a run.

Reads what `python -m ablate run` writes (names in `ablate.schema`) and needs neither torch nor a GPU:

    from analysis import load, render
    runs = load.load("runs/default")          # pandas frames, and what is wrong with the files
    report = render.write_report("runs/default")
"""
