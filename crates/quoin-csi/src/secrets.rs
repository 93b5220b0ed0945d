//! Secrets of a call: their values are overwritten when they are dropped.

use std::collections::HashMap;
use std::ops::Deref;

use zeroize::Zeroize;

/// The map that came with a call.
pub struct Secrets(HashMap<String, String>);

impl Secrets {
    /// Takes them out of a request, which has none afterwards.
    pub fn take(from: &mut HashMap<String, String>) -> Self {
        Self(std::mem::take(from))
    }
}

impl Deref for Secrets {
    type Target = HashMap<String, String>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for Secrets {
    fn drop(&mut self) {
        self.0.values_mut().for_each(Zeroize::zeroize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_whose_secrets_were_taken_has_none() {
        let mut request = HashMap::from([("encryptionKey".to_owned(), "correct horse".to_owned())]);
        let secrets = Secrets::take(&mut request);
        assert!(request.is_empty());
        assert_eq!(secrets.get("encryptionKey").map(String::as_str), Some("correct horse"));
    }
}
