"""What the uploads of a finished run tell about private rows: `pluribus.audit("runs/a")`.

measures.py       the numbers: areas under ROC curves, their intervals, PSNR
rehearsal.py      one more round of a run, to see what clients upload
disclosure.py     what uploads tell by construction
weights.py        which of a client's tensors an upload holds
membership.py     attacks that tell training rows from others
inversion.py      attacks that reconstruct images
attacks.py        the attacks on a field, by where it comes from
findings.py       what was found
audit.py          the audit of one or several runs
page.py           one HTML page

The package is also the function `pluribus.audit`.
"""

from pluribus.internal.packages import make_callable

make_callable(__name__, "audit")
