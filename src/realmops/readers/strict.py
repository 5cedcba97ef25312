"""Office files in ISO/IEC 29500 Strict, for openpyxl."""

import re
from io import BytesIO
from zipfile import ZipFile

from realmops.readers.contents import open_package

_NAME = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/(main|relationships)\b")


def open_office(data: bytes) -> tuple[BytesIO, ZipFile]:
    file, package = BytesIO(data), open_package(data)
    if b"purl.oclc.org" in package.read("_rels/.rels"):
        file = BytesIO()
        with ZipFile(file, "w") as out:
            for name in package.namelist():
                out.writestr(name, _NAME.sub(rb"http://schemas.openxmlformats.org/\1/2006/\2", package.read(name)))
        package = ZipFile(file)
    return file, package
