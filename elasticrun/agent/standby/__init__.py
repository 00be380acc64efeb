"""WHAT THE NEXT LIFE OF THE RANKS WILL BE: the orders that start it ahead of time.

Forbidden here: decisions; nothing may depend on a standby.
"""
