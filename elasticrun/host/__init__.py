"""This machine: Linux (`system`), devices (`accelerators`), diagnosis (`doctor`), run folders
(`runs`), the user's folder, log lines. Forbidden: agent, master, fork server, torch.
"""
