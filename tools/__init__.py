"""Tools around the runtime: what this machine can do, test models, benchmarks and demonstrations.

The algorithm is not here: tools call `specdec.runtime` and `specdec.export` as any user would.
"""
