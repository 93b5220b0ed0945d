//! Output of commands: tables for people, JSON and YAML for programs.
//!
//! Programs read [`serde::Serialize`] views that the commands own, never the wire messages,
//! so a field renamed on the wire breaks no script.

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::io::Write;

/// How a command prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Columns a person reads.
    Table,
    /// The same with every column.
    Wide,
    Json,
    Yaml,
}

/// A row of a listing: cells in the order of its header.
pub trait Row: Serialize {
    /// Column names; those from [`Row::NARROW`] on show in wide tables only.
    const HEADER: &'static [&'static str];
    /// How many columns the narrow table has.
    const NARROW: usize;
    /// Cells, as many as the header has.
    fn cells(&self) -> Vec<String>;
}

/// Prints a listing; an empty table says `nothing` instead of a bare header.
pub fn print_list<R: Row>(format: Format, rows: &[R], nothing: &str) -> Result<()> {
    match format {
        Format::Json | Format::Yaml => print_value(format, &rows),
        Format::Table | Format::Wide if rows.is_empty() => print_line(nothing),
        Format::Table => print_line(&table(rows, R::NARROW)),
        Format::Wide => print_line(&table(rows, R::HEADER.len())),
    }
}

/// Prints one object: `text` for people, the view for programs.
pub fn print_one<T: Serialize>(
    format: Format,
    view: &T,
    text: impl FnOnce() -> String,
) -> Result<()> {
    match format {
        Format::Json | Format::Yaml => print_value(format, view),
        Format::Table | Format::Wide => print_line(text().trim_end()),
    }
}

fn print_value<T: Serialize>(format: Format, value: &T) -> Result<()> {
    let text = match format {
        Format::Yaml => serde_yaml_ng::to_string(value)?,
        _ => serde_json::to_string_pretty(value)?,
    };
    print_line(text.trim_end())
}

/// Prints a line; a reader that went away (`| head`) ends the program quietly.
pub fn print_line(text: &str) -> Result<()> {
    let mut output = std::io::stdout().lock();
    match writeln!(output, "{text}").and_then(|()| output.flush()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => std::process::exit(0),
        result => Ok(result?),
    }
}

/// Text from outside as one line: control characters, which move a terminal, are written out.
pub fn plain(text: &str) -> String {
    escaped(text, "")
}

fn escaped(text: &str, kept: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for letter in text.chars() {
        let turns = matches!(letter, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        match (letter.is_control() || turns) && !kept.contains(letter) {
            true => plain.extend(letter.escape_default()),
            false => plain.push(letter),
        }
    }
    plain
}

/// An error and its causes. A cause that a message already contains is not repeated. Names come
/// from outside, so of control characters only ends of lines are left as they are.
pub fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    escaped(&text, "\n")
}

/// A word as a shell takes it whole.
pub fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !word.is_empty() && !word.starts_with('-') && word.bytes().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

fn table<R: Row>(rows: &[R], columns: usize) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(&R::HEADER[..columns]);
    for row in rows {
        table.add_row(row.cells().iter().take(columns).map(|cell| plain(cell)));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let text = table.to_string();
    text.lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// Aligned `name  value` lines; empty values are left out.
pub fn fields(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let shown = pairs.iter().filter(|(_, value)| !value.is_empty());
    shown.map(|(name, value)| format!("{name:<width$}  {}\n", escaped(value, "\n"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Stone(&'static str, u32);

    impl Row for Stone {
        const HEADER: &'static [&'static str] = &["NAME", "WEIGHT", "NOTE"];
        const NARROW: usize = 2;
        fn cells(&self) -> Vec<String> {
            vec![self.0.into(), self.1.to_string(), "wide only".into()]
        }
    }

    #[test]
    fn what_others_wrote_into_a_cell_moves_no_terminal() {
        let rows = [Stone("cor\u{1b}[2Jner\nforged", 7)];
        let shown = table(&rows, Stone::NARROW);
        assert!(!shown.contains('\u{1b}') && shown.lines().count() == 2, "{shown}");
        let shown = fields(&[("message", "a\u{1b}]52;\u{7}b".into())]);
        assert_eq!(shown.chars().filter(|c| c.is_control()).count(), 1, "{shown}");
    }

    #[test]
    fn a_narrow_table_omits_wide_columns_and_trailing_blanks() {
        let rows = [Stone("corner", 7), Stone("key", 12)];
        let narrow = table(&rows, Stone::NARROW);
        assert_eq!(narrow, "NAME    WEIGHT\ncorner  7\nkey     12");
        assert!(table(&rows, 3).contains("wide only"));
    }

    #[test]
    fn a_cause_that_is_part_of_the_message_is_not_repeated() {
        let source = || std::io::Error::from_raw_os_error(98);
        let told = anyhow::Error::new(source()).context(format!("cannot listen ({})", source()));
        assert_eq!(sentence(&told).matches("Address").count(), 1, "{}", sentence(&told));
        let untold = anyhow::Error::new(source()).context("cannot listen");
        assert!(sentence(&untold).starts_with("cannot listen: Address"), "{}", sentence(&untold));
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(plain("gr\u{1b}[31mün\r\n\u{9b}"), "gr\\u{1b}[31mün\\r\\n\\u{9b}");
        let error = anyhow::anyhow!("one: \u{7}").context("two\n\u{1b}[2J");
        assert_eq!(sentence(&error), "two\n\\u{1b}[2J: one: \\u{7}");
    }

    #[test]
    fn words_are_quoted_where_a_shell_would_split_or_expand_them() {
        assert_eq!(quoted("db-1.x"), "db-1.x");
        assert_eq!(quoted("a b"), "'a b'");
        assert_eq!(quoted("*"), "'*'");
        assert_eq!(quoted("it's"), "'it'\\''s'");
        assert_eq!(quoted(""), "''");
    }

    #[test]
    fn fields_are_aligned_and_empty_ones_omitted() {
        let text =
            fields(&[("name", "db".into()), ("waits for", String::new()), ("id", "7".into())]);
        assert_eq!(text, "name       db\nid         7\n");
    }
}
