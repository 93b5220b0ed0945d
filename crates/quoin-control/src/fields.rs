//! Checks of fields that members and users fill in.

use std::net::{IpAddr, SocketAddr};

use crate::Error;
use crate::text::{is_control, plain};

pub(crate) const TEXT_BYTES_MAX: usize = 1024;

/// Checks a word that is kept and shown as it is.
pub(crate) fn short(field: &'static str, text: &str) -> Result<(), Error> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(Error::invalid(field, format!("at most {TEXT_BYTES_MAX} bytes")));
    }
    if text.chars().any(is_control) {
        return Err(Error::invalid(field, "no control characters, such as an end of a line"));
    }
    Ok(())
}

/// Returns a sentence as it is kept: of one line, since an error of a disk may have several.
pub(crate) fn sentence(field: &'static str, text: &str) -> Result<String, Error> {
    if text.len() > TEXT_BYTES_MAX {
        return Err(Error::invalid(field, format!("at most {TEXT_BYTES_MAX} bytes")));
    }
    Ok(plain(text))
}

/// Reads an identifier of 32 hex digits.
pub(crate) fn id<T: std::str::FromStr>(field: &'static str, text: &str) -> Result<T, Error> {
    if text.len() != 32 {
        return Err(Error::invalid(field, "32 hex digits are needed"));
    }
    text.parse().map_err(|_| Error::invalid(field, "32 hex digits are needed"))
}

/// Returns true if the text is a host's name or IP address, with or without a port.
pub(crate) fn is_address(text: &str) -> bool {
    const NAME_BYTES_MAX: usize = 253;
    if text.parse::<IpAddr>().is_ok() || text.parse::<SocketAddr>().is_ok() {
        return true;
    }
    let (host, port) = text.rsplit_once(':').map_or((text, None), |(h, p)| (h, Some(p)));
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port != 0);
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_BYTES_MAX).contains(&host.len())
        && host.bytes().all(is_plain)
        && host.bytes().any(|byte| byte.is_ascii_alphanumeric())
        && port.is_none_or(is_port)
}
