"""Linux: processes, signals to process trees, routes, private folders, process titles.

Forbidden here: asyncio, torch, grpc, and anything of elasticrun except this package.
"""
