"""``make demo``: two real engines, one dialog, and the way from a checkpoint to a page.

``python -m vllm_fork.demo`` starts a CPU engine with retention off and one with it on,
the event consumer and the dashboard, plays the same dialog against both engines, and
checks that the reuse that the client saw is the reuse that the store, the traces and
the dashboard tell.
"""
