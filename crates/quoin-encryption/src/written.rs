//! Forms of bytes and keys in JSON: hex digits.

/// Bytes that are no secret.
pub mod hex_bytes {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};

    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(bytes))
    }

    /// # Errors
    /// Text that is not of hex digits.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(deserializer)?;
        hex::decode(text).map_err(D::Error::custom)
    }
}

/// A data key on a socket of this host. Whoever serializes with it writes a bare key.
pub mod bare_key {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serializer};
    use zeroize::Zeroizing;

    use crate::DataKey;
    use crate::key::DATA_KEY_BYTES;

    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(key: &DataKey, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&Zeroizing::new(hex::encode(key.bytes())))
    }

    /// # Errors
    /// Text that is no key. The message repeats nothing of it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DataKey, D::Error> {
        let text = Zeroizing::new(String::deserialize(deserializer)?);
        let mut bytes = Zeroizing::new(vec![0; DATA_KEY_BYTES]);
        hex::decode_to_slice(text.as_bytes(), &mut bytes)
            .map_err(|_| D::Error::custom("a key that is not of 128 hex digits"))?;
        DataKey::of_bytes(bytes).map_err(D::Error::custom)
    }
}

/// As [`bare_key`], where a key may be absent.
pub mod bare_key_or_none {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use crate::DataKey;

    #[derive(Serialize, Deserialize)]
    struct Bare(#[serde(with = "super::bare_key")] DataKey);

    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(
        key: &Option<DataKey>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        key.clone().map(Bare).serialize(serializer)
    }

    /// # Errors
    /// As those of [`super::bare_key`].
    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<DataKey>, D::Error> {
        Ok(Option::<Bare>::deserialize(deserializer)?.map(|bare| bare.0))
    }
}
