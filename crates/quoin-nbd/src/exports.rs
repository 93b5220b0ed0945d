//! Exports: the volumes that a client may open at one listener, and the clients that may see them.

use quoin_types::ClientId;
use quoin_types::block::DeviceInfo;
use rustls::pki_types::CertificateDer;

/// Reason for which a client gets no export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// No export has that name, or none that this client may see.
    Unknown,
    /// The client's certificate is valid, but not for this export; the text tells the client why.
    Forbidden(String),
}

impl Refused {
    /// The reason as a text for the client.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Unknown => "this server has no export of this name",
            Self::Forbidden(why) => why,
        }
    }
}

/// Proofs of a client by TLS.
#[derive(Clone, Copy)]
pub struct Proven<'a> {
    pub certificates: &'a [CertificateDer<'static>],
    /// Secret of this connection, which its two ends alone have.
    pub secret: [u8; 32],
}

/// Returns the secret of a connection, which its two ends alone have.
///
/// # Errors
/// The handshake has not ended.
pub fn connection_secret<Data>(
    connection: &rustls::ConnectionCommon<Data>,
) -> Result<[u8; 32], rustls::Error> {
    connection.export_keying_material([0; 32], b"EXPORTER-quoin-nbd", None)
}

/// The exports behind one connection. They are looked up for each option again, so that a volume
/// that grew or was removed meanwhile is reported correctly.
pub trait Exports: Send {
    /// Receives what TLS has just proven; called before any other method.
    fn identify(&mut self, _proven: &Proven<'_>) {}

    /// Receives a client's proof that it has the key of a volume, made over [`Proven::secret`].
    fn prove(&self, _proof: [u8; 32]) {}

    /// Called when a volume has grown.
    fn device_changed(&mut self, _device: &DeviceInfo) {}

    /// Description of the export for clients, beside its size.
    fn description(&self) -> String {
        Description::default().to_string()
    }

    /// Returns the names that this client may open.
    ///
    /// # Errors
    /// [`Refused`] if it may open none.
    fn list(&self) -> Result<Vec<String>, Refused>;

    /// Returns the client that a connection to this export is of, if clients of it number their
    /// requests, and whether it begins with the connection. `shown`: the id that it was given
    /// before; 0: none.
    ///
    /// # Errors
    /// [`Refused::Forbidden`]: the client is over, for good. [`Refused::Unknown`]: not now.
    fn client(&self, _name: &[u8], _shown: ClientId) -> Result<Option<(ClientId, bool)>, Refused> {
        Ok(None)
    }

    /// Returns the export of that name; the empty name selects the default one.
    ///
    /// # Errors
    /// [`Refused`].
    fn find(&self, name: &[u8]) -> Result<DeviceInfo, Refused>;
}

/// An export's description, by which a server and the attach process agree on the use of the
/// volume. Other clients show it to people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The first epoch of the present node's use; 0: unknown.
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
    /// Reads a description; that of another server leaves the use unknown.
    pub(crate) fn parse(text: &[u8]) -> Self {
        let epoch = text.strip_prefix(SINCE.as_bytes());
        let epoch = epoch.and_then(|epoch| std::str::from_utf8(epoch).ok()?.parse().ok());
        Self { since_epoch: epoch.unwrap_or(0) }
    }
}

/// An attachment of a shared volume, whose clients number their changing requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbering {
    /// Number of the attachment, higher than those of all before it; 0: its clients do not number
    /// their requests.
    pub attachment: u64,
    /// Drawn for the connection, for a client that begins.
    pub random: u64,
}

impl Numbering {
    /// As [`Exports::client`].
    ///
    /// # Errors
    /// [`Refused::Forbidden`]: the client is of a former attachment. [`Refused::Unknown`]: it is of
    /// one that this server has not heard of.
    pub fn client(&self, shown: ClientId) -> Result<Option<(ClientId, bool)>, Refused> {
        match (self.attachment, shown) {
            (0, ClientId(0)) => Ok(None),
            (attachment, ClientId(0)) => {
                Ok(Some((ClientId::of_attachment(attachment, self.random), true)))
            }
            (attachment, shown) if shown.attachment() == attachment => Ok(Some((shown, false))),
            (attachment, shown) if shown.attachment() < attachment => Err(Refused::Forbidden(
                "the attachment that this device was made for is over".to_owned(),
            )),
            _ => Err(Refused::Unknown),
        }
    }
}

/// A socket of one volume, and the use of the volume.
#[derive(Clone, Debug)]
pub struct VolumeExport {
    pub device: DeviceInfo,
    pub description: Description,
    pub numbering: Numbering,
}

impl Exports for VolumeExport {
    fn device_changed(&mut self, device: &DeviceInfo) {
        self.device.clone_from(device);
    }

    fn description(&self) -> String {
        self.description.to_string()
    }

    fn list(&self) -> Result<Vec<String>, Refused> {
        self.device.list()
    }

    fn client(&self, name: &[u8], shown: ClientId) -> Result<Option<(ClientId, bool)>, Refused> {
        self.find(name)?;
        self.numbering.client(shown)
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
    fn a_client_is_over_only_where_a_later_attachment_is_known() {
        let of = |attachment| ClientId::of_attachment(attachment, 77);
        let client = |attachment, shown| Numbering { attachment, random: 5 }.client(shown);
        let begun = Some((ClientId::of_attachment(9, 5), true));
        assert_eq!(client(9, ClientId(0)), Ok(begun));
        assert_eq!(client(9, of(9)), Ok(Some((of(9), false))));
        assert_eq!(client(0, ClientId(0)), Ok(None));
        assert!(matches!(client(9, of(8)), Err(Refused::Forbidden(_))));
        assert_eq!(client(9, of(10)), Err(Refused::Unknown), "the server is behind");
        assert_eq!(client(0, of(9)), Err(Refused::Unknown));
    }

    #[test]
    fn the_epoch_of_a_use_is_parsed_from_its_description_only() {
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
