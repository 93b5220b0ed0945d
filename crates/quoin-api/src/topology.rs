//! Segments of topology: where a node or a pool stands.
//!
//! A segment is a key and a value, as in `quoin.io/zone=west`. The keys that Quoin issues share one
//! prefix. Keys are compared without regard to case.

/// Prefix of every key that Quoin issues.
pub const PREFIX: &str = "quoin.io";
/// The node itself: each node has this segment by its name, and so have the pools of its host.
pub const NODE_KEY: &str = "quoin.io/node";
pub const RACK_KEY: &str = "quoin.io/rack";
pub const ZONE_KEY: &str = "quoin.io/zone";
/// Segment that early versions issued for all members of a cluster. It restricts nothing.
pub const CLUSTER_KEY: &str = "quoin.io/cluster";

/// Most bytes of a file of labels.
pub const LABELS_BYTES_MAX: usize = 256 << 10;

/// Labels of Kubernetes, and the segments that they stand for.
const LABELS: [(&str, &str); 3] = [
    ("topology.kubernetes.io/region", "quoin.io/region"),
    ("topology.kubernetes.io/zone", ZONE_KEY),
    ("topology.quoin.io/rack", RACK_KEY),
];

/// Returns whether the text is `name` or `prefix/name`.
pub fn is_key(key: &str) -> bool {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    prefix.is_none_or(is_domain) && is_label(name)
}

/// Returns whether the text has 1 to 63 characters, alphanumeric at both ends, '-', '_' and '.' in
/// between.
pub fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    let inside = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(inside)
        && bytes[0].is_ascii_alphanumeric()
        && bytes[bytes.len() - 1].is_ascii_alphanumeric()
}

/// Returns whether the text is lower-case labels of a domain name, 63 characters in all.
fn is_domain(text: &str) -> bool {
    let label = |label: &str| {
        let bytes = label.as_bytes();
        let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        !bytes.is_empty()
            && bytes.iter().all(|byte| plain(byte) || *byte == b'-')
            && plain(&bytes[0])
            && plain(&bytes[bytes.len() - 1])
    };
    text.len() <= 63 && text.split('.').all(label)
}

/// Reads a segment of an operator, as in `quoin.io/zone=west`; the key in lower case.
///
/// # Errors
/// The rule that it breaks.
pub fn parse_segment(text: &str) -> Result<(String, String), String> {
    let (key, value) =
        text.split_once('=').ok_or("write it as KEY=VALUE, as in quoin.io/zone=west")?;
    check_own(key, value)?;
    Ok((key.to_ascii_lowercase(), value.to_owned()))
}

/// Checks a segment that a node or pool is to have.
///
/// # Errors
/// The rule that it breaks.
pub fn check_own(key: &str, value: &str) -> Result<(), String> {
    let shown = |text: &str| text.chars().take(80).collect::<String>();
    let is_ours = key.split_once('/').is_some_and(|(prefix, _)| prefix == PREFIX);
    if !is_ours || !is_key(key) {
        return Err(format!(
            "{:?} is no key of Quoin: keys are {PREFIX}/ and a name, as in {ZONE_KEY}",
            shown(key)
        ));
    }
    if key.eq_ignore_ascii_case(NODE_KEY) {
        return Err(format!("{NODE_KEY} is the node's own name, which it has by itself"));
    }
    if !is_label(value) {
        return Err(format!(
            "{:?} is no value of {key}: 1 to 63 letters, digits, '-', '_' and '.', with a letter or \
             digit at both ends",
            shown(value)
        ));
    }
    Ok(())
}

/// Reads the segments out of a file of labels, a line each, as in `topology.kubernetes.io/zone=west`
/// or `quoin.io/rack="r1"` (the form of Kubernetes' downward API). Other labels are left out.
///
/// # Errors
/// The line that is no label, or the segment that breaks a rule.
pub fn parse_labels(text: &str) -> Result<Vec<(String, String)>, String> {
    if text.len() > LABELS_BYTES_MAX {
        return Err(format!("has more than {LABELS_BYTES_MAX} bytes"));
    }
    let mut segments: Vec<(String, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let number = number + 1;
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| format!("line {number} is not KEY=VALUE, as in {ZONE_KEY}=west"))?;
        let value = value.strip_prefix('"').and_then(|v| v.strip_suffix('"')).unwrap_or(value);
        let mapped = LABELS.iter().find(|(label, _)| *label == key).map(|(_, own)| *own);
        let is_ours = key.split_once('/').is_some_and(|(prefix, _)| prefix == PREFIX);
        let Some(key) = mapped.or_else(|| is_ours.then_some(key)) else { continue };
        check_own(key, value).map_err(|rule| format!("line {number}: {rule}"))?;
        let key = key.to_ascii_lowercase();
        match segments.iter().find(|(known, _)| *known == key) {
            // A label of Kubernetes and one of Quoin may say the same.
            Some((_, known)) if known == value => {}
            Some((_, known)) => {
                return Err(format!("line {number}: {key} is {value:?} and {known:?}; keep one"));
            }
            None => segments.push((key, value.to_owned())),
        }
    }
    Ok(segments)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_segment_of_an_operator_has_the_projects_prefix_and_a_plain_value() {
        assert_eq!(parse_segment("quoin.io/Zone=w1"), Ok(("quoin.io/zone".into(), "w1".into())));
        for (wrong, words) in [
            ("zone", "KEY=VALUE"),
            ("zone=a", "no key of Quoin"),
            ("example.com/zone=a", "no key of Quoin"),
            ("quoin.io/=a", "no key of Quoin"),
            ("quoin.io/zone=", "no value"),
            ("quoin.io/zone=-a", "no value"),
            ("quoin.io/node=h1", "by itself"),
        ] {
            let refused = parse_segment(wrong).unwrap_err();
            assert!(refused.contains(words), "{wrong}: {refused}");
        }
    }

    #[test]
    fn labels_of_kubernetes_become_segments_and_others_are_left_out() {
        let text = "# of the node\ntopology.kubernetes.io/zone=\"west\"\nkubernetes.io/arch=amd64\n\
                    quoin.io/rack=r1\nquoin.io/zone=west\n";
        let segments = parse_labels(text).unwrap();
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!(segments, [pair(ZONE_KEY, "west"), pair(RACK_KEY, "r1")]);
        for (wrong, words) in [
            ("quoin.io/rack", "line 1 is not KEY=VALUE"),
            ("quoin.io/rack=_", "line 1"),
            ("quoin.io/zone=a\ntopology.kubernetes.io/zone=b", "keep one"),
        ] {
            let refused = parse_labels(wrong).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
        assert!(parse_labels(&"#".repeat(LABELS_BYTES_MAX + 1)).is_err());
    }

    proptest! {
        #[test]
        fn no_labels_make_the_reader_panic(text in ".*") {
            let _ = parse_labels(&text);
            let _ = parse_segment(&text);
        }
    }
}
