"""What setup.cfg cannot hold: that files of ``data_files`` lie where Python looks for lines to run at its start."""

from setuptools import Distribution, setup


class InstallData(Distribution().get_command_class("install_data")):
    """Beside the packages, not under the prefix."""

    def finalize_options(self) -> None:
        self.set_undefined_options("install", ("install_lib", "install_dir"))
        super().finalize_options()


class WithData(Distribution):
    """With data files in editable installs as well, where setuptools asks for them by a name that it does not have."""

    has_data = Distribution.has_data_files


setup(distclass=WithData, cmdclass={"install_data": InstallData})
