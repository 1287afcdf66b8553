"""A trainer for DFlash drafters: several target threads feed several drafter threads in one process.

A drafter proposes a block of tokens at once from the hidden states of a frozen target model; the target then checks
the block in a single forward (arXiv 2602.06036). Checkpoints have the layout of https://github.com/z-lab/dflash.

The trainer uses fxsafe as any other project would: ``fxsafe.install()`` in its entry point, and nothing else of it.
It needs the extra ``fxsafe[dflash]``; nothing in fxsafe's core imports it.

Shape suffixes of tensor names, for all modules here:

==  =====================================  ==  ===========================================
B   sequences of a micro-batch             H   hidden size (the target's and the drafter's)
S   context positions                      F   features: tapped layers times H
N   blocks, one for each anchor            V   vocabulary rows
K   slots of a block (the block size)      A   query heads
Q   N * K block slots in a row             G   key/value heads
T   S + Q keys                             D   size of a head
C   candidates of a slot (DFlash 2)        R   rank of the selector's codebooks (DFlash 2)
==  =====================================  ==  ===========================================
"""
