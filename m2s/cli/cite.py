"""`m2s cite [NAME]`: BibTeX of the paper and of the methods it builds on."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from m2s.report import Refused

REFERENCES = {
    "m2s": r"""@misc{li-m2s,
  title  = {Mean-to-Score Discrete Diffusion: Posterior-Mean Denoisers for Score Entropy},
  author = {Li, Jingyuan and Jiang, Xiaoyi and Jiang, Yixuan and Liu, Wei and Zhu, Yi and Shi, Zuoqiang and Hu, Pipi},
}""",
    "sedd": r"""@inproceedings{lou2024discrete,
  title     = {Discrete Diffusion Modeling by Estimating the Ratios of the Data Distribution},
  author    = {Lou, Aaron and Meng, Chenlin and Ermon, Stefano},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
}""",
    "md4": r"""@inproceedings{shi2024simplified,
  title     = {Simplified and Generalized Masked Diffusion for Discrete Data},
  author    = {Shi, Jiaxin and Han, Kehang and Wang, Zhe and Doucet, Arnaud and Titsias, Michalis K.},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
    "mdlm": r"""@inproceedings{sahoo2024simple,
  title     = {Simple and Effective Masked Diffusion Language Models},
  author    = {Sahoo, Subham Sekhar and Arriola, Marianne and Schiff, Yair and Gokaslan, Aaron and Marroquin, Edgar
               and Chiu, Justin T. and Rush, Alexander and Kuleshov, Volodymyr},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2024},
}""",
    "gidd": r"""@inproceedings{vonrutte2025gidd,
  title     = {Generalized Interpolating Discrete Diffusion},
  author    = {von R{\"u}tte, Dimitri and Fluri, Janis and Ding, Yuhui and Orvieto, Antonio and Sch{\"o}lkopf, Bernhard
               and Hofmann, Thomas},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
}""",
    "d3pm": r"""@inproceedings{austin2021structured,
  title     = {Structured Denoising Diffusion Models in Discrete State-Spaces},
  author    = {Austin, Jacob and Johnson, Daniel D. and Ho, Jonathan and Tarlow, Daniel and van den Berg, Rianne},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2021},
}""",
    "campbell": r"""@inproceedings{campbell2022ctmc,
  title     = {A Continuous Time Framework for Discrete Denoising Models},
  author    = {Campbell, Andrew and Benton, Joe and De Bortoli, Valentin and Rainforth, Tom and Deligiannidis, George
               and Doucet, Arnaud},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2022},
}""",
}


@dataclass(frozen=True)
class Cite:
    """Print BibTeX of the paper and of the methods it builds on.

    Names: m2s, sedd, md4, mdlm, gidd, d3pm, campbell; without one, all of them.

    Example: m2s cite sedd
    """

    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None
    """Which one."""

    def run(self) -> None:
        if self.name is not None and self.name.lower() not in REFERENCES:
            raise Refused(f"there is no reference {self.name!r}: choose from {', '.join(REFERENCES)}")
        chosen = REFERENCES.values() if self.name is None else [REFERENCES[self.name.lower()]]
        print("\n\n".join(chosen))
