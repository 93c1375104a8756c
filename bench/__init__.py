"""Speed and memory against the rivals: ``python -m bench run [--quick]``, ``python -m bench compare A B``.

plan → groups/   which comparisons, and the rounds of each
interleave       rivals take turns; processes: each in its own, and none outlives its parent
host, worker     one rival's trainer and workers; rivals/: the adapters; standin, rpcnet: what they need of torchrl
policy, board    weights and forwards that tell their version: every push is checked, every mixed forward is seen
copies, subscribers, micro, collecting, stepping   the other things that are measured, each served by a process
results, stats   samples of all rounds, as JSON
report, requirements, lose, plots        what people read; compare: what fails a release
"""
