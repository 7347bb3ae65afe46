"""MoE dispatch and combine: calls, pools, and how ranks of a communicator meet and compute."""
