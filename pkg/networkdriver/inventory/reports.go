// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package inventory

import (
	"fmt"
	"strings"

	"github.com/cilium/statedb"
	"github.com/cilium/statedb/index"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// ReportTableName is the name of the table of what the device managers reported last.
const ReportTableName = "networkdriver-device-managers"

// Report is a row of the table of device managers: what a manager's last snapshot came to. Rows are immutable.
type Report struct {
	// Manager is the device manager.
	Manager types.DeviceManagerType
	// Devices is the number of its devices in the inventory.
	Devices int
	// Skipped are the devices left out, by the manager or by the inventory, each with its reason.
	Skipped []types.Skipped
	// Problems are what of the manager's configuration cannot be met.
	Problems []types.Problem
}

// TableHeader implements [statedb.TableWritable].
func (r *Report) TableHeader() []string {
	return []string{"Manager", "Devices", "Skipped", "Problems"}
}

// TableRow implements [statedb.TableWritable].
func (r *Report) TableRow() []string {
	skipped := make([]string, len(r.Skipped))
	for i, s := range r.Skipped {
		skipped[i] = s.Device + ": " + s.Reason
	}
	problems := make([]string, len(r.Problems))
	for i, p := range r.Problems {
		problems[i] = p.Field + ": " + p.Message
	}
	return []string{r.Manager.String(), fmt.Sprint(r.Devices), strings.Join(skipped, "; "), strings.Join(problems, "; ")}
}

var reportManagerIndex = statedb.Index[*Report, types.DeviceManagerType]{
	Name:       "manager",
	FromObject: func(r *Report) index.KeySet { return index.NewKeySet(index.Stringer(r.Manager)) },
	FromKey:    index.Stringer[types.DeviceManagerType],
	FromString: index.FromString,
	Unique:     true,
}

// ReportByManager queries the reports by device manager.
var ReportByManager = reportManagerIndex.Query

// NewReportTable registers the table of reports.
func NewReportTable(db *statedb.DB) (statedb.RWTable[*Report], error) {
	return statedb.NewTable(db, ReportTableName, reportManagerIndex)
}
