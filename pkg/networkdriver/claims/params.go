// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package claims

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"

	"github.com/cilium/networkdriver/pkg/networkdriver/types"
)

// How exactly a configuration names a request; the more exact one is applied later.
const (
	notNamed = iota
	namesAll
	namesRequest
	namesSubrequest
)

// Asked is what is asked of one device.
type Asked struct {
	types.DeviceConfig
	// ByClaim is what of it the claim asks for itself. The rest is from the device class, which is the administrator's.
	ByClaim types.DeviceConfig
	// Class is the device class of the request, and FromClass what the claim's allocation says that its parameters are.
	Class     string
	FromClass [][]byte
}

// ResolveConfigs returns what is asked of each of the claim's allocation results of the driver, in their order.
//
// Configurations of device classes come before those of the claim. Within each of the two, one for all requests comes
// before one for the request, which comes before one for the subrequest; otherwise the order in the allocation
// counts. A later configuration overrides the parameters that it sets and no others. Entries for other drivers, and
// those that name none of the driver's requests, are not looked at.
func ResolveConfigs(claim *resourceapi.ResourceClaim, driver string) ([]Asked, error) {
	results := resultsOf(claim, driver)
	if len(results) == 0 {
		return nil, nil
	}
	type layer struct {
		rank    int
		byClaim bool
		cfg     types.DeviceConfig
		raw     []byte
	}
	layers := make([][]layer, len(results))
	written := claim.Spec.Devices.Config
	for _, entry := range claim.Status.Allocation.Devices.Config {
		if entry.Opaque == nil || entry.Opaque.Driver != driver {
			continue
		}
		rank, origin, err := originOf(claim, results, entry)
		if err != nil {
			return nil, permanentError{err}
		}
		names := entry.Requests
		if entry.Source == resourceapi.AllocationConfigSourceClaim {
			names, written = asWritten(entry, written, results)
		}
		var cfg types.DeviceConfig
		parsed := false
		for i, result := range results {
			exactness := exactnessOf(names, result.Request)
			if exactness == notNamed {
				continue
			}
			if !parsed {
				if cfg, err = types.ParseDeviceConfig(entry.Opaque.Parameters.Raw); err != nil {
					return nil, permanentError{fmt.Errorf("request %q: %s: %w", result.Request, origin, err)}
				}
				parsed = true
			}
			layers[i] = append(layers[i], layer{rank: rank + exactness, byClaim: entry.Source == resourceapi.AllocationConfigSourceClaim, cfg: cfg,
				raw: entry.Opaque.Parameters.Raw})
		}
	}
	asked := make([]Asked, len(results))
	classes := classByRequest(claim)
	for i, result := range results {
		asked[i].Class = classes[result.Request]
		slices.SortStableFunc(layers[i], func(a, b layer) int { return cmp.Compare(a.rank, b.rank) })
		for _, l := range layers[i] {
			asked[i].DeviceConfig = asked[i].Override(l.cfg)
			if l.byClaim {
				asked[i].ByClaim = asked[i].ByClaim.Override(l.cfg)
			} else {
				asked[i].FromClass = append(asked[i].FromClass, l.raw)
			}
		}
		if len(asked[i].Addresses) > 0 && isForSeveral(claim, results, result.Request) {
			return nil, permanentError{fmt.Errorf("request %q: parameters: addresses: the request is for several devices (count, or allocationMode All), which cannot "+
				"all have them; make a request for each", result.Request)}
		}
		if err := asked[i].CheckTogether(); err != nil {
			return nil, permanentError{fmt.Errorf("request %q: all parameters together: %w", result.Request, err)}
		}
	}
	return asked, nil
}

// isForSeveral says whether the request, or subrequest, has several devices, or could have.
func isForSeveral(claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult, name string) bool {
	devices := 0
	for _, result := range results {
		if result.Request == name {
			devices++
		}
	}
	mode := resourceapi.DeviceAllocationMode("")
	for _, request := range claim.Spec.Devices.Requests {
		if request.Name == name && request.Exactly != nil {
			mode = request.Exactly.AllocationMode
		}
		for _, sub := range request.FirstAvailable {
			if request.Name+"/"+sub.Name == name {
				mode = sub.AllocationMode
			}
		}
	}
	return devices > 1 || mode == resourceapi.DeviceAllocationModeAll
}

// originOf ranks a configuration by where it comes from, and says that in words. A class's configuration without
// requests is only understood if there is one class: schedulers before Kubernetes issue 134789 was resolved never
// say which requests a class's configuration is for, newer ones leave it out only if it is for all.
func originOf(claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult,
	entry resourceapi.DeviceAllocationConfiguration,
) (rank int, origin string, err error) {
	switch entry.Source {
	case resourceapi.AllocationConfigSourceClaim:
		return 1 + namesSubrequest, "parameters", nil
	case resourceapi.AllocationConfigSourceClass:
		if len(entry.Requests) == 0 {
			if classes := classesOf(claim, results); len(classes) > 1 {
				return 0, "", fmt.Errorf("requests %s: parameters from a device class are ambiguous: the scheduler does not say "+
					"for which request they are, and the claim uses the classes %s; use one class, or one claim for each",
					quoteAll(requestNames(results)), quoteAll(classes))
			}
		}
		return 0, "parameters from the device class", nil
	default:
		return 0, "", fmt.Errorf("requests %s: parameters come from %q, which is neither %s nor %s", quoteAll(requestNames(results)),
			entry.Source, resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim)
	}
}

// asWritten returns the names in a configuration of the claim as its author wrote them, and what of the spec's
// configurations comes after it. Newer schedulers leave the names out of the allocation where they amount to all
// requests, so that a configuration for the only request, or for its subrequest, would look like one for all.
func asWritten(entry resourceapi.DeviceAllocationConfiguration, spec []resourceapi.DeviceClaimConfiguration,
	results []resourceapi.DeviceRequestAllocationResult,
) (names []string, rest []resourceapi.DeviceClaimConfiguration) {
	if len(entry.Requests) > 0 {
		return entry.Requests, spec
	}
	for i, config := range spec {
		if config.Opaque == nil || config.Opaque.Driver != entry.Opaque.Driver ||
			!sameJSON(config.Opaque.Parameters.Raw, entry.Opaque.Parameters.Raw) {
			continue
		}
		if !slices.ContainsFunc(results, func(r resourceapi.DeviceRequestAllocationResult) bool {
			return exactnessOf(config.Requests, r.Request) == notNamed
		}) {
			return config.Requests, spec[i+1:]
		}
	}
	return nil, spec
}

// sameJSON says whether two documents differ in form at most.
func sameJSON(a, b []byte) bool {
	if bytes.Equal(a, b) {
		return true
	}
	var x, y any
	return json.Unmarshal(a, &x) == nil && json.Unmarshal(b, &y) == nil && reflect.DeepEqual(x, y)
}

// exactnessOf says how exactly the names of a configuration name the request of a result, which is "request" or
// "request/subrequest". No names at all name every request.
func exactnessOf(names []string, request string) int {
	if len(names) == 0 {
		return namesAll
	}
	parent, _, isSub := strings.Cut(request, "/")
	switch {
	case isSub && slices.Contains(names, request):
		return namesSubrequest
	case slices.Contains(names, parent):
		return namesRequest
	default:
		return notNamed
	}
}

// classesOf returns the sorted names of the device classes that the results were allocated from.
func classesOf(claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult) []string {
	classes := classByRequest(claim)
	var used []string
	for _, result := range results {
		used = append(used, classes[result.Request])
	}
	slices.Sort(used)
	return slices.Compact(used)
}

// classByRequest returns the device classes of the claim's requests, by request or request/subrequest.
func classByRequest(claim *resourceapi.ResourceClaim) map[string]string {
	classes := map[string]string{}
	for _, request := range claim.Spec.Devices.Requests {
		if request.Exactly != nil {
			classes[request.Name] = request.Exactly.DeviceClassName
		}
		for _, sub := range request.FirstAvailable {
			classes[request.Name+"/"+sub.Name] = sub.DeviceClassName
		}
	}
	return classes
}

func requestNames(results []resourceapi.DeviceRequestAllocationResult) []string {
	var names []string
	for _, result := range results {
		names = append(names, result.Request)
	}
	return slices.Compact(names)
}

func quoteAll(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = fmt.Sprintf("%q", name)
	}
	return strings.Join(quoted, ", ")
}
