"""Sampler and learner of a training server, driven by a loop in this process: `groupwise rl … run.server=http://gpu-machine:8000`.

    session.py    parts of a server under an id: calls by number, files to and fro, a sign of life, in a thread of their own
    parts.py      what `groupwise.build` asks for: the layout of the server's machine, and parts that are ready
    learner.py    a `groupwise.types.Learner` there
    sampler.py    a `groupwise.types.Sampler` there

Run, record and checkpoints are here. The server keeps nothing that the loop could not do without: when its engine ends, the run is gone
on with from the last checkpoint, which holds the learner's state to the bit.
"""
