"""This node's part in work that is handed out.

Forbidden here: deciding who gets what (`core/work`), torch.
"""
