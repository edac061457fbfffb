"""The realizability lab: a static page that computes scores, posteriors and samples in the browser.

The source is TypeScript in web/. `npm run build` there writes index.html, lab.js and lab.css to this folder, and they are
committed. The networks are built-in weights, as scripts that the page loads when they are needed.
"""

from m2s.report.lab.files import DOCUMENTATION, FILES, lab_file, write_lab
from m2s.report.lab.server import LabServer
from m2s.report.lab.weights import weights_script

__all__ = ["DOCUMENTATION", "FILES", "LabServer", "lab_file", "weights_script", "write_lab"]
