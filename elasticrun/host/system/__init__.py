"""What Linux knows: processes, signals to all of them, routes, private folders, titles in `ps`.

Forbidden here: asyncio, torch, grpc, and anything of elasticrun but itself and names of the
environment.
"""
