//! Which volumes a client may open at one listener, and which clients are told of them.

use quoin_types::block::DeviceInfo;
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

    /// What clients are told of the export beside its size.
    fn description(&self) -> String {
        Description::default().to_string()
    }

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

/// An export's description, in which a server and the attach process agree on which use of the
/// volume this is. Clients that do not know that show it to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The first epoch of the present node's use; 0: not known.
    pub since_epoch: u64,
}

const TEXT: &str = "Quoin volume";
const SINCE: &str = "Quoin volume, used here since epoch ";

impl std::fmt::Display for Description {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.since_epoch {
            0 => f.write_str(TEXT),
            epoch => write!(f, "{SINCE}{epoch}"),
        }
    }
}

impl Description {
    /// What another server says is not known.
    pub(crate) fn parse(text: &[u8]) -> Self {
        let epoch = text.strip_prefix(SINCE.as_bytes());
        let epoch = epoch.and_then(|epoch| std::str::from_utf8(epoch).ok()?.parse().ok());
        Self { since_epoch: epoch.unwrap_or(0) }
    }
}

/// A socket of one volume, and which use of it this is.
#[derive(Clone, Debug)]
pub struct Used {
    pub device: DeviceInfo,
    pub description: Description,
}

impl Exports for Used {
    fn device_changed(&mut self, device: &DeviceInfo) {
        self.device.clone_from(device);
    }

    fn description(&self) -> String {
        self.description.to_string()
    }

    fn list(&self) -> Result<Vec<String>, Refused> {
        self.device.list()
    }

    fn find(&self, name: &[u8]) -> Result<DeviceInfo, Refused> {
        self.device.find(name)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_read_from_its_description_and_nothing_else_is_taken_for_one() {
        for since_epoch in [0, 1, 31, u64::MAX] {
            let description = Description { since_epoch };
            assert_eq!(Description::parse(description.to_string().as_bytes()), description);
        }
        let others: [&[u8]; 4] =
            [b"", b"a disk", b"Quoin volume, used here since epoch x", b"\xff\xfe"];
        for other in others {
            assert_eq!(Description::parse(other).since_epoch, 0);
        }
    }
}
