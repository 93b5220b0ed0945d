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

/// A data key on a socket of this host. Its serialized form is the bare key.
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

/// A user's key on a socket of this host. Its serialized form is the bare key.
pub mod bare_user_key {
    use serde::de::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use zeroize::Zeroizing;

    use crate::UserKey;

    #[derive(Serialize)]
    #[serde(rename_all = "snake_case")]
    enum Told<'a> {
        Passphrase(&'a str),
        Raw(&'a str),
    }

    #[derive(Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Heard {
        Passphrase(String),
        Raw(String),
    }

    /// # Errors
    /// Errors of the serializer.
    pub fn serialize<S: Serializer>(key: &UserKey, serializer: S) -> Result<S::Ok, S::Error> {
        let (UserKey::Passphrase(bytes) | UserKey::Raw(bytes)) = key;
        let text = Zeroizing::new(hex::encode(bytes));
        match key {
            UserKey::Passphrase(_) => Told::Passphrase(&text).serialize(serializer),
            UserKey::Raw(_) => Told::Raw(&text).serialize(serializer),
        }
    }

    /// # Errors
    /// Text that is no key. The message repeats nothing of it.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<UserKey, D::Error> {
        let none = || D::Error::custom("a key that is none");
        let bytes = |text: String| {
            let text = Zeroizing::new(text);
            hex::decode(text.as_bytes()).map(Zeroizing::new).map_err(|_| none())
        };
        let key = match Heard::deserialize(deserializer)? {
            Heard::Passphrase(text) => UserKey::passphrase(bytes(text)?),
            Heard::Raw(text) => UserKey::raw(bytes(text)?),
        };
        key.map_err(|_| none())
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
