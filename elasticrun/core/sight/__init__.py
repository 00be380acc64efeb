"""What the master knows of training itself: who hangs and why, where the time went, what happened.

Forbidden here: I/O, a clock, an order about rounds or ranks. A verdict is a demand that the job
carries out; all else is told. Rounds, nodes and failures are looked at and never changed."""
