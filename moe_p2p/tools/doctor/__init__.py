"""`python -m moe_p2p doctor`: what a machine, or the hosts of a job, have for moe_p2p and lack.

command.py  options; one machine, hosts, or ranks that were started already
examine.py  the facts of this machine: GPUs, NICs, libraries, limits; writes over each NIC
surroundings.py, network.py, silent.py  more facts: PCIe, IOMMU, clocks, CPUs; MTU, PFC, ECN; what
            makes programs take TCP, or another package, without a word
report.py   all facts of one machine, to JSON and back
judge.py, faults.py  problems of one machine, with their remedies: pure
job.py      problems of a job and what differs between its hosts, from their reports: pure
hosts.py, ranks.py  bring the reports of other hosts here: over ssh or srun; from started ranks
text.py, job_text.py  a machine's report and a job's page
"""
