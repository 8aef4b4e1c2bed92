"""The rows of `simforcing policy`: each command lies in a module of its own beside this one."""

ROWS = (
    ("train", "policy_train:PolicyTrain", "train a policy from scratch or from a world model; resumes by itself"),
    ("eval", "policy_eval:PolicyEval", "success rates on LIBERO, with intervals; restartable"),
    ("demos", "policy_demos:PolicyDemos", "demonstrations of LIBERO tasks by a scripted expert"),
    ("serve", "policy_serve:PolicyServe", "a policy behind the openpi websocket protocol"),
)
"""Word, target and summary."""
