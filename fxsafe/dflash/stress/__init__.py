"""``fxsafe dflash stress``: one training load from cold caches, under plain torch, work-arounds and fxsafe.

``plan`` holds the choices and the modes, ``load`` is what the threads do, ``start`` is one cold start in a process of
its own, ``runner`` starts them, notices hangs and collects, ``report`` makes the table and the picture.
"""
