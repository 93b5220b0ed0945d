//! Which volumes a client may open at one door, and who is told so.

use quoin_core::block::DeviceInfo;
use rustls::pki_types::CertificateDer;

/// Why a client gets no export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// There is none of that name, or none that this client may know of.
    Unknown,
    /// The client's certificate is good, but not for this; the text tells the client why.
    Forbidden(String),
}

impl Refused {
    /// In the client's words.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Unknown => "no export of this name here",
            Self::Forbidden(why) => why,
        }
    }
}

/// The exports behind one connection. Asked anew for each option, so a volume that grew or went
/// away between two of them is told as it is.
pub trait Exports: Send {
    /// Whose certificate chain TLS has just proven; called before anything is asked.
    fn identify(&mut self, _certificates: &[CertificateDer<'static>]) {}

    /// A volume grew.
    fn device_changed(&mut self, _device: &DeviceInfo) {}

    /// The names that this client may open.
    ///
    /// # Errors
    /// [`Refused`] if it may open none.
    fn list(&self) -> Result<Vec<String>, Refused>;

    /// The export of that name; the empty name asks for the default one.
    ///
    /// # Errors
    /// [`Refused`].
    fn find(&self, name: &[u8]) -> Result<DeviceInfo, Refused>;
}

/// A socket of one volume, which is its default export too.
impl Exports for DeviceInfo {
    fn device_changed(&mut self, device: &DeviceInfo) {
        self.clone_from(device);
    }

    fn list(&self) -> Result<Vec<String>, Refused> {
        Ok(vec![self.name.clone()])
    }

    fn find(&self, name: &[u8]) -> Result<DeviceInfo, Refused> {
        if name.is_empty() || name == self.name.as_bytes() {
            Ok(self.clone())
        } else {
            Err(Refused::Unknown)
        }
    }
}
