// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
)

// printing is how the answers are printed.
type printing struct {
	output    string
	noHeaders bool
	jsonYAML  *genericclioptions.JSONYamlPrintFlags
	templates *genericclioptions.KubeTemplatePrintFlags
	now       func() time.Time
}

func newPrinting() *printing {
	return &printing{
		jsonYAML: genericclioptions.NewJSONYamlPrintFlags(), templates: genericclioptions.NewKubeTemplatePrintFlags(), now: time.Now,
	}
}

func (p *printing) addFlags(cmd *cobra.Command) {
	formats := append([]string{"wide"}, append(p.jsonYAML.AllowedFormats(), p.templates.AllowedFormats()...)...)
	flags := cmd.PersistentFlags()
	flags.StringVarP(&p.output, "output", "o", "", "Output format. One of: "+strings.Join(formats, ", "))
	cmd.Flags().BoolVar(&p.noHeaders, "no-headers", false, "Print no line with the names of the columns")
	// The printers' own flags, which they add to one command alone.
	printerFlags := &cobra.Command{}
	p.jsonYAML.AddFlags(printerFlags)
	p.templates.AddFlags(printerFlags)
	flags.AddFlagSet(printerFlags.Flags())
}

// object prints the object if a format for programs was asked for.
func (p *printing) object(w io.Writer, object runtime.Object) (printed bool, err error) {
	if p.output == "" || p.output == "wide" {
		return false, nil
	}
	printer, err := p.jsonYAML.ToPrinter(p.output)
	if genericclioptions.IsNoCompatiblePrinterError(err) {
		printer, err = p.templates.ToPrinter(p.output)
	}
	if genericclioptions.IsNoCompatiblePrinterError(err) {
		return true, fmt.Errorf("--output: %q is none of wide, %s", p.output,
			strings.Join(append(p.jsonYAML.AllowedFormats(), p.templates.AllowedFormats()...), ", "))
	}
	if err != nil {
		return true, err
	}
	if _, ok := printer.(*printers.JSONPrinter); ok || p.output == "json" {
		w = jsonWriter{w}
	}
	return true, printer.PrintObj(object, w)
}

// column is one of a table for people.
type column struct {
	name string
	wide bool
	cell func(*Device) string
}

// ofUse returns a cell that is empty for a device without use.
func ofUse(text func(*Use) string) func(*Device) string {
	return func(d *Device) string {
		if d.Use == nil {
			return ""
		}
		return text(d.Use)
	}
}

var columns = []column{
	{"NODE", false, func(d *Device) string { return d.Node }},
	{"POOL", false, func(d *Device) string { return d.Pool }},
	{"DEVICE", false, func(d *Device) string { return d.Device }},
	{"MANAGER", true, func(d *Device) string { return d.Manager }},
	{"PF", true, func(d *Device) string { return d.PF }},
	{"HOST-INTERFACE", true, func(d *Device) string { return d.HostInterface }},
	{"STATE", false, func(d *Device) string { return d.State }},
	{"CLAIM", false, ofUse(func(u *Use) string { return u.Namespace + "/" + u.Claim })},
	{"REQUEST", true, ofUse(func(u *Use) string { return u.Request })},
	{"POD", false, ofUse((*Use).pod)},
	{"INTERFACE", false, ofUse(func(u *Use) string { return u.Interface })},
	{"NETWORK", false, ofUse(func(u *Use) string { return u.Network })},
	{"VLAN", true, ofUse(func(u *Use) string {
		if u.VLAN == 0 {
			return ""
		}
		return strconv.Itoa(u.VLAN)
	})},
	{"MAC", true, ofUse(func(u *Use) string { return u.MAC })},
	{"ADDRESSES", true, ofUse(func(u *Use) string { return strings.Join(u.Addresses, ",") })},
	{"HEALTH", false, (*Device).health},
}

func (u *Use) pod() string {
	switch {
	case u.Pod == "":
		return ""
	case len(u.Waiting) > 0:
		return fmt.Sprintf("%s/%s (+%d)", u.Namespace, u.Pod, len(u.Waiting))
	}
	return u.Namespace + "/" + u.Pod
}

func (d *Device) health() string {
	if len(d.Problems) == 0 {
		if d.State == StateNotOffered {
			return d.Reason
		}
		return "ok"
	}
	words := make([]string, len(d.Problems))
	for i, p := range d.Problems {
		words[i] = p.String()
	}
	return strings.Join(words, ",")
}

// devices prints a list of devices.
func (p *printing) devices(streams genericiooptions.IOStreams, list *DeviceList) error {
	for _, unread := range list.Unread {
		fmt.Fprintf(streams.ErrOut, "Not told: %s\n", safe(unread))
	}
	if printed, err := p.object(streams.Out, list); printed {
		return err
	}
	if len(list.Items) == 0 {
		fmt.Fprintln(streams.ErrOut, "There is no such device. What the nodes are to offer is said by NodeConfigs: kubectl get ndnc")
		return nil
	}
	return p.table(streams.Out, list.Items)
}

// table prints devices in columns. It goes over them twice instead of keeping their cells, since there may be very many.
func (p *printing) table(w io.Writer, devices []Device) error {
	var shown []column
	for _, c := range columns {
		if !c.wide || p.output == "wide" {
			shown = append(shown, c)
		}
	}
	widths := make([]int, len(shown))
	for i, c := range shown {
		widths[i] = len(c.name)
	}
	for i := range devices {
		for j, c := range shown {
			widths[j] = max(widths[j], utf8.RuneCountInString(cell(c, &devices[i])))
		}
	}
	out := bufio.NewWriterSize(w, 1<<16)
	line := func(text func(column) string) {
		for j, c := range shown {
			t := text(c)
			out.WriteString(t)
			if j == len(shown)-1 {
				break
			}
			for range widths[j] + 3 - utf8.RuneCountInString(t) {
				out.WriteByte(' ')
			}
		}
		out.WriteByte('\n')
	}
	if !p.noHeaders {
		line(func(c column) string { return c.name })
	}
	for i := range devices {
		line(func(c column) string { return cell(c, &devices[i]) })
	}
	// The writer keeps its first error.
	return out.Flush()
}

func cell(c column, d *Device) string {
	if text := c.cell(d); text != "" {
		return safe(text)
	}
	return "-"
}

// safe makes a text from the cluster fit to be shown in one line: what a terminal would act on, or what would pretend to be another
// text, such as escape sequences, line ends and changes of direction, is spelt out.
func safe(text string) string {
	if strings.IndexFunc(text, func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case unicode.IsPrint(r):
			b.WriteRune(r)
		default:
			b.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
		text = text[size:]
	}
	return b.String()
}

// jsonWriter spells out, in JSON that is written as a whole, what [safe] does in texts. It is the same document: such characters are
// nowhere but in strings, as JSON has line ends outside of them and none inside.
type jsonWriter struct{ io.Writer }

// Write implements [io.Writer].
func (w jsonWriter) Write(data []byte) (int, error) {
	isSafe := func(r rune) bool { return r == '\n' || unicode.IsPrint(r) }
	var out []byte
	start := 0
	for i := 0; i < len(data); {
		r, size := rune(data[i]), 1
		if r >= utf8.RuneSelf {
			r, size = utf8.DecodeRune(data[i:])
		}
		if !isSafe(r) {
			out = append(out, data[start:i]...)
			units := utf16.AppendRune(nil, r)
			for _, unit := range units {
				out = fmt.Appendf(out, `\u%04x`, unit)
			}
			start = i + size
		}
		i += size
	}
	if start == 0 {
		return w.Writer.Write(data)
	}
	if _, err := w.Writer.Write(append(out, data[start:]...)); err != nil {
		return 0, err
	}
	return len(data), nil
}
