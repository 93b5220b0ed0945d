//! Form of a volume's options in records.

/// A choice by the name of its variant, as in `Cache`.
pub mod variant {
    use std::fmt::{Debug, Display};
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<T: Debug, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{value:?}"))
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        String::deserialize(from)?.to_ascii_lowercase().parse().map_err(D::Error::custom)
    }
}

/// A choice by its word.
pub mod word {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<T: Display, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<T, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// A choice by its number.
pub mod number {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::volume::BlockSize;

    pub fn serialize<S: Serializer>(value: &BlockSize, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u32(value.bytes())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<BlockSize, D::Error> {
        u32::deserialize(from)?.to_string().parse().map_err(D::Error::custom)
    }
}

/// A choice by its word; none is an empty text.
pub mod word_or_empty {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_str(""),
        }
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        let text = String::deserialize(from)?;
        (!text.is_empty()).then(|| text.parse().map_err(D::Error::custom)).transpose()
    }
}

/// A choice by its word; none is null.
pub mod word_or_null {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<T: Display, S: Serializer>(
        value: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.collect_str(value),
            None => to.serialize_none(),
        }
    }

    pub fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|text| text.parse().map_err(D::Error::custom)).transpose()
    }
}
